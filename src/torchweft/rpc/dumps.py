"""Writes what a worker does to a file; see ``observed`` for the signal and for other workers.

The timer thread notices a long wait, and a thread of the reactor writes the file, so that threads
of the program need not run. The worker that waits tells all others: the one that it waits for,
through others perhaps, may wait for none itself.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator

from torchweft import knobs
from torchweft.errors import ConfigurationError, NotInitialized, WorkerLost
from torchweft.files import replacing
from torchweft.protocol.observing.keys import SHUTDOWN
from torchweft.protocol.observing.report import DETAIL, FILE_SUFFIX, encode
from torchweft.rpc.activity import threads
from torchweft.rpc.reporting import Reporter
from torchweft.rpc.worker import Worker
from torchweft.wire.frames import encode_frame
from torchweft.wire.messages import Kind

_log = logging.getLogger("torchweft")

_LEAST_PAUSE_S = 5.0
"""Two files of one worker are at least so far apart, unless a signal asks."""
_LOOK_S = 1.0


class Dumps:
    """Writes the reports of one worker to files.

    Args:
        worker: The worker.
        reporter: Makes the reports.
        group: The name of the group.
    """

    def __init__(self, worker: Worker, reporter: Reporter, group: str) -> None:
        self._worker = worker
        self._agent = agent = worker.agent
        self._reporter = reporter
        self._group = group
        self._after_s = knobs.DUMP_AFTER_S.get() or math.inf
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._last_s = -math.inf
        if not math.isinf(self._after_s):
            agent.timers.add(self.tick)

    def folder(self) -> str:
        """Returns the folder for the files of the group, which is made now if it is missing.

        Raises:
            ConfigurationError: It cannot be made, or others can write into it.
        """
        chosen = knobs.DUMP_DIR.get()
        path = chosen or os.path.join(tempfile.gettempdir(), f"torchweft-{os.geteuid()}")
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            if not chosen:
                _check_own(path)
                path = os.path.join(path, self._group)
                os.makedirs(path, 0o700, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make the folder {path!r}: {error.strerror}; set "
                f"{knobs.DUMP_DIR.variable} to one that this user can write to"
            ) from error
        return path

    def write(self, reason: str, *, is_wanted: bool = False) -> str:
        """Writes the report; returns the path of the file, or "" if there is a fresh one.

        Args:
            reason: Why, for the log.
            is_wanted: Whether a person asks, so that a fresh file is replaced as well.
        """
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._last_s < _LEAST_PAUSE_S and not is_wanted:
                return ""
            self._last_s = now_s
            folder = self.folder()
            path = os.path.join(folder, self._agent.info.name.replace(":", "_") + FILE_SUFFIX)
            self._agent.events.note("wrote a report: %s", reason)
            data = encode(self._reporter.report(DETAIL))
            with replacing(path) as file:
                file.write(data)
        _log.warning(
            "worker %r wrote what it does to %s, as %s; torchweft explain %s",
            self._agent.info.name,
            path,
            reason,
            folder,
        )
        return path

    def try_to_write(self, reason: str, is_wanted: bool = False) -> None:
        """Writes the report as ``write`` does; logs an error."""
        try:
            self.write(reason, is_wanted=is_wanted)
        except (OSError, ConfigurationError) as error:
            name = self._agent.info.name
            _log.warning("worker %r could not write what it does: %s", name, error)

    # Long waits

    def tick(self, now_s: float) -> float:
        """Looks for waits that take too long; a job of the timers."""
        late = {
            key: text for key, age_s, text in _long_waits(self._worker) if age_s > self._after_s
        }
        news = late.keys() - self._told
        self._told = set(late)
        if news:
            self._agent.reactor.submit(self.try_to_write, late[min(news)], False)
            self._agent.reactor.submit(self._tell_others)
        return now_s + min(_LOOK_S, self._after_s)

    def _tell_others(self, _: object, __: object) -> None:
        for peer in self._agent.members.present():
            if not peer.is_self and peer.lost is None:
                try:
                    self._agent.sender.post(peer, encode_frame(Kind.DUMP, 0, 0, b""))
                except (WorkerLost, NotInitialized):
                    continue


def _long_waits(worker: Worker) -> Iterator[tuple[str, float, str]]:
    """Yields the key, the age and a description of each wait of a thread for other workers.

    A wait in ``shutdown`` is as long as other workers have work, and is left out.
    """
    for thread in threads(worker, with_frames=False):
        for wait in thread.waits:
            if wait.kind != SHUTDOWN:
                text = f"thread {thread.name} has waited {wait.age_s:.1f} s for {wait.name}"
                yield f"{wait.kind} {wait.key}", wait.age_s, text


def _check_own(path: str) -> None:
    """Raises ConfigurationError if others could have put a folder there, or write into it."""
    status = os.stat(path, follow_symlinks=False)
    is_sound = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_sound or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"{path!r} is no folder of this user alone; set {knobs.DUMP_DIR.variable} to one"
        )
