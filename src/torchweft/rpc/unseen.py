"""Reports errors that the program never looked at: logged once, at the caller.

A failed call has a *guard*, held by the call's future or by the value that could not be made.
Looking at the error disarms the guard. A guard that is finalized while armed queues its report,
and a task writes the log. Guards still armed at shutdown report then. Calls that succeed have no
guard, so they pay nothing.

Only the owner of a value knows whether a worker asked for it; the creator does not. So the owner
has the guard, and sends the report to the creator in a ``FAILED`` message.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torchweft.engine.codec.exceptions import shown
from torchweft.engine.protocol.calls import function_name
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.references import ReferenceKeeper
from torchweft.errors import CallCancelled, NotInitialized

_log = logging.getLogger("torchweft")

_QUEUE_LIMIT = 1000
_SHOWN_LIMIT = 20
_CALL = "the call of {} on worker {!r} failed, and its result was never looked at"
_VALUE = "a remote() call on worker {!r} failed, and its reference was never used"
_UNTOLD = (CallCancelled, NotInitialized)
"""Not reported: the program itself cancelled the call, or shut its worker down."""


class Report(NamedTuple):
    """An error that the program has not looked at.

    Attributes:
        text: Names the failed call.
        error: The error; bytes if another worker sent it or is to get it.
        creator: The worker that is to be told; None for this worker.
    """

    text: str
    error: BaseException | bytes
    creator: Peer | None = None


class Guard:
    """Reports an error when finalized, unless the error was looked at.

    Args:
        report: What to report.
        enqueue: Takes the report; called by the finalizer.
    """

    __slots__ = ("__weakref__", "_enqueue", "_report", "was_seen")

    def __init__(self, report: Report, enqueue: Callable[[Report], None]) -> None:
        self.was_seen = False
        self._report = report
        self._enqueue = enqueue

    def trip(self) -> None:
        """Reports the error at most once, unless it was looked at."""
        if not self.was_seen:
            self.was_seen = True
            self._enqueue(self._report)

    __del__ = trip


class UnseenErrors:
    """The guards of one worker, and the queue of their reports. Thread-safe.

    Args:
        agent: Its agent.
        references: Calls ``before_flush``, which sends the reports for creators first.
        unpack_error: Decodes the error of another worker.
        pack_error: Packs an error in a form that a worker can read.
    """

    def __init__(
        self,
        agent: Agent,
        references: ReferenceKeeper,
        unpack_error: Callable[[bytes], BaseException],
        pack_error: Callable[[Peer, BaseException], bytes],
    ) -> None:
        self._agent = agent
        self._unpack_error = unpack_error
        self._pack_error = pack_error
        self._lock = threading.RLock()
        self._guards: weakref.WeakSet[Guard] = weakref.WeakSet()
        self._failed: deque[Report] = deque(maxlen=_QUEUE_LIMIT)
        self._untold: deque[Report] = deque()
        agent.receiver.on(Kind.FAILED, self._on_message, inline=True)
        references.before_flush = self._tell_creators
        self._timer = agent.timers.add(self.tick)

    def guard(self, error: BaseException, call: PendingCall) -> Guard | None:
        """Returns a guard for the error of this worker's call; None if it needs no report."""
        if isinstance(error, _UNTOLD):
            return None
        name = function_name(call.function)
        return self._keep(Report(_CALL.format(name, call.worker_name), error))

    def guard_value(self, error: BaseException, creator: Peer) -> Guard | None:
        """Returns a guard for a value that could not be made for ``creator``, or None."""
        if isinstance(error, _UNTOLD):
            return None
        if creator.is_self:
            return self._keep(Report(_VALUE.format(creator.name), error))
        return self._keep(Report("", self._pack_error(creator, error), creator))

    def _keep(self, report: Report) -> Guard:
        guard = Guard(report, self._enqueue)
        with self._lock:
            self._guards.add(guard)
        return guard

    def _enqueue(self, report: Report) -> None:
        """Queues a report; called by finalizers."""
        (self._failed if report.creator is None else self._untold).append(report)
        self._timer.wake_by(0.0)

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        self._failed.append(Report(_VALUE.format(peer.name), bytes(frame.control)))
        self._agent.reactor.submit_task(self._log_task)

    def _tell_creators(self) -> None:
        """Sends the reports for creators, before the messages that end their references."""
        for _, content, creator in _taken(self._untold):
            assert creator is not None
            assert isinstance(content, bytes)
            try:
                self._agent.sender.post(creator, encode_frame(Kind.FAILED, 0, 0, content))
            except Exception:  # The other reports, and the references behind them, go out.
                log_exception("an error could not be reported to worker %r", creator.name)

    def tick(self, now_s: float) -> float:
        """Empties the queues; a job of the timers."""
        self._tell_creators()
        if self._failed:
            # As a task: the program's logging handlers may block.
            self._agent.reactor.submit_task(self._log_task)
        return math.inf

    def close(self) -> None:
        """Reports the errors not looked at so far, because this worker leaves."""
        with self._lock:
            guards = list(self._guards)
        for guard in guards:
            guard.trip()
        self._log_task(None, None)

    def _log_task(self, _: object, __: object) -> None:
        _log_all(list(_taken(self._failed)), self._unpack_error)


def _taken(queue: deque[Report]) -> Iterator[Report]:
    """Empties a queue from which other threads take as well."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


def _log_all(reports: Iterable[Report], read: Callable[[bytes], BaseException]) -> None:
    """Logs reports; merges equal reports."""
    errors: dict[tuple[str, str], BaseException] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for text, error, _ in reports:
        known = read(error) if isinstance(error, bytes) else error
        key = (text, shown(known))
        errors.setdefault(key, known)
        counts[key] += 1
    for key in list(errors)[:_SHOWN_LIMIT]:
        times = f" ({counts[key]} times)" if counts[key] > 1 else ""
        _log.error("%s%s", key[0], times, exc_info=errors[key])
    if len(errors) > _SHOWN_LIMIT:
        _log.error("%d more failed calls were never looked at", len(errors) - _SHOWN_LIMIT)
