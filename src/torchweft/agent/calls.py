"""A call that waits for its answer, on the caller's side."""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import Any

from torchweft.agent.served_calls import ServedCall
from torchweft.errors import CallCancelled, CallTimeout
from torchweft.transport.interrupts import call as run
from torchweft.wire.frames import Frame

Subject = tuple[Any, ...]
"""A function that returns the name of what is called, and its arguments."""
Named = str | bytes | Subject | Callable[..., Any]
"""What is called, or its name."""


class PendingCall:
    """One open call: whom it asks, until when, and the answer once there is one.

    Whoever takes the call out of the call table completes it, once: with the frame that answers
    it or with an error. ``on_done``, where there is one, then runs as a task, or in the thread that
    waits for the call if that thread, the ``reader``, read the answer itself.

    ``parent`` is the call of another worker in whose course it is made, if it is; ``number`` what
    the callee knows it by, once it is on its way.
    """

    __slots__ = (
        "_done",
        "deadline_s",
        "error",
        "frame",
        "function",
        "kept",
        "number",
        "on_done",
        "parent",
        "reader",
        "started_s",
        "timeout_s",
        "worker",
        "worker_name",
    )

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
        self.reader = 0
        self.kept: object = None
        self.frame: Frame | None = None
        self.error: BaseException | None = None
        self._done = allocate_lock()
        self._done.acquire()

    @property
    def is_done(self) -> bool:
        """Whether the call was completed, one way or the other."""
        return not self._done.locked()

    @property
    def has_outcome(self) -> bool:
        """Whether an answer or an error is here, though perhaps not yet looked at."""
        return self.frame is not None or self.error is not None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call was made."""
        return time.monotonic() - self.started_s

    def finish(self) -> None:
        """Wakes those who wait. The outcome is in ``frame`` or ``error`` by now."""
        self._done.release()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until done or for ``timeout_s``; returns whether it is done."""
        bounded_s = -1 if timeout_s > threading.TIMEOUT_MAX else max(timeout_s, 0)
        acquire = partial(self._done.acquire, True, bounded_s)
        # Both in one step: see torchweft.transport.interrupts.
        return [*takewhile(bool, map(run, (acquire, self._done.release)))] != []

    def timeout_error(self, *, had_connection: bool = True) -> CallTimeout:
        """Returns the error of a call whose time is up.

        Args:
            had_connection: Whether there was a connection by which to send it.
        """
        name, parent = function_name(self.function), self.parent
        text = (
            f"RPC ran for more than set timeout ({self.timeout_s * 1e3:.0f} ms) and will now be "
            f"marked with an error: {name} on worker {self.worker_name!r}; "
        )
        if parent is not None and self.deadline_s >= parent.deadline_s:
            text += late_with(parent)
        elif not had_connection:
            text += (
                "it was not sent: that worker has not answered the attempt to connect to it. It is "
                "stopped or busy, or the network is slow"
            )
        else:
            text += (
                "the worker may still be running it. Pass a longer timeout= if the function needs "
                "the time"
            )
        return CallTimeout(text, worker=self.worker_name, call=name, elapsed_s=self.elapsed_s)

    def interrupted_error(self) -> CallCancelled:
        """Returns the error of a call whose caller was interrupted while it read the answer."""
        name = function_name(self.function)
        return CallCancelled(
            f"the caller was interrupted while it read the answer of {name} on worker "
            f"{self.worker_name!r}, which is lost",
            worker=self.worker_name,
            call=name,
        )

    def orphan_error(self) -> CallCancelled:
        """Returns the error of a call whose parent was cancelled."""
        assert self.parent is not None
        return orphan_error(self.parent, self.worker_name, self.function)


class Completion:
    """How far the main thread has come in completing the future of a call, each part in one step.

    Args:
        call: The call.
        on_done: What completes the future. Called again where it was interrupted.
    """

    __slots__ = ("call", "consumed", "on_done", "taken")

    def __init__(self, call: PendingCall, on_done: Callable[[PendingCall], None]) -> None:
        self.call = call
        self.on_done = on_done
        self.consumed: list[int] = []
        """The size of the answer, once nobody else will read it."""
        self.taken: list[PendingCall | None] = []
        """What was in the table of calls under its number."""


def late_with(parent: ServedCall) -> str:
    """Returns why a nested call had no more time."""
    return (
        f"the limit was that of worker {parent.peer.name!r}, for whose call it was made and which "
        "waits no longer. Pass a longer timeout= there"
    )


def orphan_error(parent: ServedCall, worker_name: str, function: Named) -> CallCancelled:
    """Returns the error of a nested call whose parent was cancelled."""
    name, caller = function_name(function), parent.peer.name
    return CallCancelled(
        f"{name} on worker {worker_name!r} was called for worker {caller!r}, which has given up or "
        "is lost; call it within torchweft.rpc.detached() if it is to run all the same",
        worker=worker_name,
        call=name,
    )


def function_name(function: Named) -> str:
    """Returns a readable name of what is called, for messages."""
    if isinstance(function, tuple):
        describe, *arguments = function
        return str(describe(*arguments))
    if isinstance(function, bytes):
        return function.decode("utf-8", "backslashreplace")
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    module = getattr(function, "__module__", None)
    if name is None:
        return repr(function)
    return f"{module}.{name}" if module else str(name)
