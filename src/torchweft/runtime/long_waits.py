"""Says for whom this worker waits, once, where a wait takes long.

What waits pays nothing for that: it says where its open waits are to be found, and the thread that
looks at the clock goes through them. Before there is such a thread, while the workers of a group
find each other, a ``Notice`` is asked within the loop that waits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torchweft import knobs

_log = logging.getLogger("torchweft")


class Lacking(NamedTuple):
    """What a wait lacks: a text that names it, and the names of the workers it is for."""

    text: str
    workers: tuple[str, ...] = ()


Following = Callable[[Callable[[], Lacking]], contextlib.AbstractContextManager[object]]
"""Follows a shutdown within a ``with`` block, given what says who is waited for."""


class OpenWait(NamedTuple):
    """A wait that has not ended.

    Attributes:
        key: What tells it from others.
        since_s: When it began, by ``time.monotonic``.
        describe: Says where, and for whom: ``"in barrier for 'worker1'"``.
    """

    key: object
    since_s: float
    describe: Callable[[], str]


Source = Callable[[], Iterable[OpenWait]]


class Notice:
    """One wait of a worker, told of when it has taken ``WEFT_WAIT_NOTICE_S``; not thread-safe.

    Args:
        subject: Who waits.
        describe: As in ``OpenWait``.
    """

    def __init__(self, subject: str, describe: Callable[[], str]) -> None:
        self._subject = subject
        self._describe = describe
        self._since_s = time.monotonic()
        self._due_s = self._since_s + notice_s()

    def left_s(self) -> float:
        """Returns how long it is until the wait is told of; infinite when it has been."""
        return self._due_s - time.monotonic()

    def look(self) -> None:
        """Tells of the wait if it is time."""
        if self.left_s() <= 0:
            self._due_s = math.inf
            _tell(self._subject, self._since_s, self._describe)


class LongWaits:
    """The long waits of one worker. Thread-safe.

    Args:
        worker: The worker's name.
    """

    def __init__(self, worker: str) -> None:
        self._subject = subject_of(worker)
        self._after_s = notice_s()
        self._sources: list[Source] = [lambda: list(self._during.values())]
        self._during: dict[object, OpenWait] = {}
        self._numbers = itertools.count()
        self._told: set[object] = set()

    def add(self, source: Source) -> None:
        """Has the waits of ``source`` told of; it is called by another thread than those wait."""
        self._sources.append(source)

    @contextlib.contextmanager
    def during(self, describe: Callable[[], str]) -> Iterator[None]:
        """Has the ``with`` block told of if it takes long."""
        key = next(self._numbers)
        self._during[key] = OpenWait(key, time.monotonic(), describe)
        try:
            yield
        finally:
            del self._during[key]

    def during_shutdown(
        self, lacking: Callable[[], Lacking]
    ) -> contextlib.AbstractContextManager[None]:
        """Has a shutdown told of if it takes long."""
        return self.during(lambda: f"in shutdown, serving meanwhile: {lacking().text}")

    def tick(self, now_s: float) -> float:
        """Tells of the waits whose time has come; a job of the timers."""
        waits = [wait for source in self._sources for wait in source()]
        self._told.intersection_update([wait.key for wait in waits])
        due = [wait for wait in waits if now_s - wait.since_s >= self._after_s]
        for wait in due:
            if wait.key not in self._told:
                self._told.add(wait.key)
                _tell(self._subject, wait.since_s, wait.describe)
        untold = [wait.since_s for wait in waits if wait.key not in self._told]
        return min(untold, default=math.inf) + self._after_s


def subject_of(worker: str) -> str:
    """Returns a worker's name as the subject of a message."""
    return f"worker {worker!r}"


def notice_s() -> float:
    """Returns after how many seconds a wait is told of."""
    return knobs.WAIT_NOTICE_S.get() or math.inf


def names_of(workers: Iterable[str]) -> str:
    """Returns the names of workers for a message."""
    names = [repr(name) for name in workers]
    return f"worker{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _tell(subject: str, since_s: float, describe: Callable[[], str]) -> None:
    waited_s = time.monotonic() - since_s
    _log.warning("%s has waited %.0f s %s", subject, waited_s, describe())
