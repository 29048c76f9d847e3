"""The calls of other workers on the callee's side, from arrival to end.

A caller cancels a call by its number, while the call waits in its queue, runs, or has ended. So a
call is registered under its number from the moment it is read until it has ended. A ``CANCEL``
finds its call unless that is over, so no ``CANCEL`` has to be remembered.

Calls that a served function makes are *nested* in the served call: they get no more than its
remaining time, and end with it.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import NO_CREATION
from torchweft.errors import CallCancelled, ProtocolError

SLOW_S = 0.0005
"""A function whose last run took longer is slow."""
_MOST_SLOW = 4096


class Caller(Protocol):
    """A worker that calls this one. Errors name it by ``name``."""

    name: str
    served: dict[int, ServedCall]
    """Its calls that have not ended here, by number."""

    @property
    def lost(self) -> BaseException | None:
        """The error with which the worker was lost, or None."""


class ServedCall:
    """One call of another worker. Hot path: the constructor and the attributes.

    Args:
        peer: The caller, a ``Caller``.
        frame: The request.
        arrived_s: When it was read.

    Raises:
        ProtocolError: The caller has an open call of that number; this one must not run.

    Attributes:
        function: The called function, or its name; empty until the request is decoded.
        number: The caller's number for it; 0 if the caller does not wait for an answer.
        deadline_s: When the caller stops waiting; infinity until the request is decoded.
        was_cancelled: Whether the caller has given it up, or is lost.
        has_ended: Whether it was answered, or will not be answered.
        has_nested: Whether a nested call was made.
    """

    __slots__ = (
        "_on_cancel",
        "arrived_s",
        "deadline_s",
        "frame",
        "function",
        "has_ended",
        "has_nested",
        "number",
        "peer",
        "was_cancelled",
    )

    def __init__(self, peer: Any, frame: Frame, arrived_s: float) -> None:
        self.peer = peer
        self.number = frame.id
        self.function: bytes | Callable[..., Any] = b""
        self.frame: Frame | None = frame
        self.arrived_s = arrived_s
        self.deadline_s = math.inf
        self.was_cancelled = self.has_ended = self.has_nested = False
        self._on_cancel: Callable[[Any], object] | None = None
        if frame.id:
            if frame.id in peer.served:
                raise ProtocolError(f"two calls have the number {frame.id}")
            peer.served[frame.id] = self

    def end(self) -> None:
        """Notes that the call has ended."""
        if self.number and not self.has_ended:
            del self.peer.served[self.number]
        self.has_ended = True
        self._on_cancel = None

    # Rare events

    def cancel(self) -> None:
        """Notes that its caller no longer waits. Runs no user code, and does not block."""
        self.was_cancelled = True
        on_cancel = self._on_cancel
        if on_cancel is not None:
            on_cancel(self)

    def on_cancel(self, callback: Callable[[Any], object]) -> None:
        """Calls ``callback`` with this call on cancellation, at once if it is; perhaps twice."""
        self._on_cancel = callback
        if self.was_cancelled:
            callback(self)

    @property
    def is_current(self) -> bool:
        """Whether calls that its function makes now are nested in it."""
        return self.was_cancelled or not self.has_ended

    def remaining_s(self, now_s: float) -> float:
        """Returns how long its caller still waits; infinity for a call that makes a value."""
        return max(self.deadline_s - now_s, 0.0)

    def is_unwanted(self, now_s: float) -> bool:
        """Returns whether its caller no longer waits."""
        return self.was_cancelled or now_s > self.deadline_s or self.peer.lost is not None

    def notice_unwanted(self, now_s: float) -> bool:
        """Returns whether its caller no longer waits; if so, marks it as cancelled.

        The time may be up here a moment before the caller notices. If the function was told that
        it is cancelled, its return value must not be sent as a result.
        """
        if not self.is_unwanted(now_s):
            return False
        self.was_cancelled = True
        return True


class Answering(Protocol):
    """Sends callers the outcomes of their calls. Both methods may raise any exception.

    Attributes:
        unfinished: The calls whose outcomes become values of this worker, until they do.
    """

    unfinished: set[AnsweredCall]

    @property
    def watchers(self) -> Sequence[Any]:
        """Hear of the outcomes of calls; see ``torchweft.rpc.worker``."""

    def reply(self, peer: Any, number: int, result: Any, context_id: int) -> None:
        """Answers call ``number`` with a result."""

    def reply_error(self, peer: Any, number: int, error: BaseException) -> None:
        """Answers call ``number`` with an error."""


class AnsweredCall(ServedCall, ABC):
    """A served call that is invoked with its outcome.

    A value that it makes is delivered even where its caller no longer waits: other workers may
    refer to the value by now.

    Attributes:
        worker: Sends answers. Invoked directly: an action would cost each call too much.
        context_id: The autograd context in which it runs, or 0.
        owned: The owned value that the outcome becomes; None if a caller waits.
        notes: What watchers keep with the call; unset if there were none at its begin.
    """

    __slots__ = ("context_id", "notes", "owned", "worker")

    worker: Answering
    context_id: int
    owned: Any
    notes: dict[Any, Any]

    @abstractmethod
    def create(self, creation: int) -> Any:
        """Returns the owned value that the outcome becomes.

        Returns None if the value was made before, or is not wanted.
        """

    @abstractmethod
    def keep(self, result: Any, error: BaseException | None) -> None:
        """Resolves the value ``owned`` with the outcome."""

    @abstractmethod
    def not_delivered(self, failure: BaseException) -> BaseException:
        """Logs that the outcome could not be delivered; returns the error to deliver instead."""

    @abstractmethod
    def failed_late(self) -> None:
        """Logs the error being handled, which came after the call had ended."""

    @abstractmethod
    def is_referred_to(self) -> bool:
        """Whether any reference to the value that it makes is held."""

    def begins(self, creation: int, remaining_s: float, now_s: float) -> bool:
        """Decides, when its turn comes, whether to run it; if not, ends it. Hot path.

        Args:
            creation: The number of the value that it makes, or ``NO_CREATION``.
            remaining_s: How long its caller would still wait when the request was made.
            now_s: The time.
        """
        if creation != NO_CREATION:
            self.owned = self.create(creation)
            if self.owned is None:
                self.end()
                return False
            self.worker.unfinished.add(self)
            return True
        self.deadline_s = self.arrived_s + remaining_s
        if ServedCall.is_unwanted(self, now_s):
            self.end()
            return False
        return True

    def __call__(self, result: Any, error: BaseException | None) -> None:
        """Ends the call with its outcome. Hot path."""
        watchers = self.worker.watchers
        for each in watchers:
            each.serving_ends(self, error)
        try:
            if self.owned is not None:
                self.keep(result, error)
            elif self.was_cancelled or self.has_ended:
                pass  # No caller waits, and references in the result were not handed on yet.
            elif error is None:
                self.worker.reply(self.peer, self.number, result, self.context_id)
            else:
                self.worker.reply_error(self.peer, self.number, error)
        except BaseException as failure:
            self._deliver_instead(self.not_delivered(failure))
        self.end()
        if self.owned is not None:
            self.owned = None  # Futures of nested calls may outlive the value.
            self.worker.unfinished.discard(self)
        for each in watchers:
            each.served(self, error)

    def _deliver_instead(self, error: BaseException) -> None:
        if self.owned is not None:
            self.keep(None, error)
        else:
            self.worker.reply_error(self.peer, self.number, error)

    def fail(self, error: BaseException) -> None:
        """Ends the call with the error being handled; if the call has ended, logs the error."""
        if self.has_ended:
            self.failed_late()
        else:
            self(None, error)

    def refuse(self, creation: int, remaining_s: float, now_s: float, error: BaseException) -> None:
        """Ends a call that is not to run with ``error``; see ``begins`` for the other arguments.

        A caller that no longer waits is not told.
        """
        if self.begins(creation, remaining_s, now_s):
            self(None, error)

    def give_up(self) -> None:
        """Ends a call that was cancelled while it waited for a value."""
        self(None, CallCancelled("the caller has given the call up"))

    def goes_on(self, error: BaseException | None, now_s: float) -> bool:
        """Decides, when the value that it waits for is ready, whether to run it; if not, ends it.

        Args:
            error: The error of that value, or None.
            now_s: The time.
        """
        if error is None and self.notice_unwanted(now_s):
            error = CallCancelled("the caller no longer waits for this call")
        if error is not None:
            self(None, error)
        return error is None

    def is_unwanted(self, now_s: float) -> bool:
        """Returns whether its caller no longer waits, or its value can no longer be wanted."""
        if self.number:
            return super().is_unwanted(now_s)
        return self.peer.lost is not None and not self.is_referred_to()


class CancelNested(NamedTuple):
    """An action: soon, end the calls nested in those of ``take_cancelled_parents``.

    Deferred, so that one scan of all open calls serves several cancelled parents.
    """


class CallServer:
    """Cancels the calls that one worker serves. All methods are rare events."""

    def __init__(self) -> None:
        self._cancelled_parents: deque[ServedCall] = deque()

    def cancel_received(self, caller: Caller, numbers: Iterable[int]) -> list[CancelNested]:
        """Cancels calls of a caller by their numbers; unknown numbers have ended."""
        found = map(caller.served.get, numbers)
        return self.cancel([call for call in found if call is not None])

    def caller_lost(self, caller: Caller) -> list[CancelNested]:
        """Cancels all calls of a lost caller."""
        return self.cancel(list(caller.served.copy().values()))

    def creations_lost(self, making: Iterable[AnsweredCall], caller: Caller) -> list[CancelNested]:
        """Cancels a lost caller's calls in ``making`` to whose values no reference is held."""
        return self.cancel(
            [call for call in making if call.peer is caller and call.is_unwanted(0.0)]
        )

    def cancel(self, calls: Iterable[ServedCall]) -> list[CancelNested]:
        """Cancels calls now, and the calls nested in them soon."""
        for call in calls:
            call.cancel()
            if call.has_nested:
                self._cancelled_parents.append(call)
        return [CancelNested()] if self._cancelled_parents else []

    def take_cancelled_parents(self) -> set[ServedCall]:
        """Returns the calls cancelled since the last time whose nested calls have to end."""
        parents = set()
        with contextlib.suppress(IndexError):
            while True:
                parents.add(self._cancelled_parents.popleft())
        return parents


def has_awaited(callers: Iterable[Caller]) -> bool:
    """Whether any caller waits for a call that has not ended, such as an ``async def`` function.

    A worker that leaves alone owes these callers their answers.
    """
    return any(
        not call.was_cancelled
        for caller in callers
        if caller.lost is None
        for call in caller.served.copy().values()
    )


class SlowFunctions(set[bytes]):
    """Names of functions whose last run was slow, at most 4,096. Hot path: ``in``."""

    def note(self, name: bytes, *, was_slow: bool) -> None:
        """Notes that a function has changed: it is slow no more, or has become slow.

        Args:
            name: Its name; empty if it travelled by value.
            was_slow: Whether it was slow before.
        """
        if was_slow:
            self.discard(name)
        elif name and len(self) < _MOST_SLOW:
            self.add(name)
