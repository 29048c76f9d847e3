"""A pending call, on the caller's side."""

from __future__ import annotations

import contextlib
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from torchweft.protocol.calls import Named, OpenCall, ServedCall
from torchweft.runtime.interrupts import call as run
from torchweft.wire.frames import Frame


class PendingCall(OpenCall):
    """One open call, for which threads can wait.

    The thread that takes the call out of the call table completes it once, with the answer's frame
    or with an error. ``on_done``, if set, then runs as a task, or in the waiting thread if that
    thread read the answer itself.
    """

    __slots__ = ("_done", "kept", "notes", "watchers")

    notes: dict[Any, Any]
    """What watchers keep with the call; unset if there are none."""

    def __init__(
        self,
        worker: int,
        worker_name: str,
        function: Named,
        timeout_s: float,
        on_done: Callable[[PendingCall], None] | None = None,
        parent: ServedCall | None = None,
    ) -> None:
        self.worker = worker
        self.worker_name = worker_name
        self.function = function
        self.timeout_s = timeout_s
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + timeout_s
        self.on_done = on_done
        self.parent = parent
        self.number = 0
        self.kept: object = None
        self.watchers: Sequence[Any] = ()
        self.frame: Frame | None = None
        self.error: BaseException | None = None
        self._done = allocate_lock()
        self._done.acquire()

    @property
    def is_done(self) -> bool:
        """Whether the call was completed, with an answer or an error."""
        return not self._done.locked()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call was made."""
        return time.monotonic() - self.started_s

    def unfinished(self) -> list[PendingCall]:
        """Returns the call itself until it is done; for ``Reactor.waiting``."""
        return [] if self.is_done else [self]

    def finish(self) -> None:
        """Wakes the waiting threads. The outcome is in ``frame`` or ``error`` by now."""
        for each in self.watchers:
            each.call_ends(self)
        with contextlib.suppress(RuntimeError):  # Another thread has done it.
            self._done.release()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until done or for ``timeout_s``; returns whether it is done."""
        bounded_s = -1 if timeout_s > threading.TIMEOUT_MAX else max(timeout_s, 0)
        acquire = partial(self._done.acquire, True, bounded_s)
        # Acquire and release in one uninterruptible step: see torchweft.runtime.interrupts.
        return [*takewhile(bool, map(run, (acquire, self._done.release)))] != []
