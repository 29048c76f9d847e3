"""The calls of other workers, on the side of the callee: from arrival to end.

A caller that gives a call up says so, by its number. The call may then wait in its queue, run, or
have ended. So a call is known by its number from the moment at which it is read until it has ended:
a ``CANCEL`` finds its call, or the call is over. Nothing has to be remembered for later.

Calls that a served function makes are *nested* in the call: they have no more time than is left,
and end with it.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torchweft.errors import ProtocolError
from torchweft.wire.frames import Frame
from torchweft.wire.messages import NO_CREATION


class Caller(Protocol):
    """A worker that calls this one. It is told of in errors by ``name``."""

    name: str
    served: dict[int, ServedCall]
    """Its calls that have not ended here, by their numbers."""

    @property
    def lost(self) -> BaseException | None:
        """The error by which it was lost, if it was."""


class ServedCall:
    """One call of another worker. Hot path: the constructor and the attributes.

    Args:
        peer: The caller, a ``Caller``.
        frame: The request.
        arrived_s: When it was read.

    Raises:
        ProtocolError: The caller has an open call of that number; this one must not run.

    Attributes:
        function: What is called, or its name; empty until the request has been looked at.
        number: What the caller knows it by; 0 for one that nobody waits for.
        deadline_s: How long the caller waits; infinity until the request has been looked at.
        was_cancelled: Whether the caller has given it up, or is lost.
        has_ended: Whether it was answered, or is not to be answered.
        has_nested: Whether a call was made in its course.
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
        self._on_cancel: Callable[[], object] | None = None
        if frame.id:
            if frame.id in peer.served:
                raise ProtocolError(f"two calls have the number {frame.id}")
            peer.served[frame.id] = self

    def end(self) -> None:
        """Notes that nothing more comes of it."""
        if self.number and not self.has_ended:
            del self.peer.served[self.number]
        self.has_ended = True
        self._on_cancel = None

    # Rare events

    def cancel(self) -> None:
        """Notes that nobody waits for it. Runs no user code, and does not block."""
        self.was_cancelled = True
        on_cancel = self._on_cancel
        if on_cancel is not None:
            on_cancel()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Has ``callback`` called when it is cancelled, now if it was; perhaps twice."""
        self._on_cancel = callback
        if self.was_cancelled:
            callback()

    @property
    def is_current(self) -> bool:
        """Whether calls that its function makes now are part of it."""
        return self.was_cancelled or not self.has_ended

    def remaining_s(self, now_s: float) -> float:
        """Returns how long its caller waits still; infinity for as long as the value is wanted."""
        return max(self.deadline_s - now_s, 0.0)

    def is_unwanted(self, now_s: float) -> bool:
        """Whether nobody waits for it any more."""
        return self.was_cancelled or now_s > self.deadline_s or self.peer.lost is not None

    def notice_unwanted(self, now_s: float) -> bool:
        """Whether nobody waits for it any more; if so, it counts as cancelled from here on.

        Its time may be up here a moment before the caller notices. What a function returns that
        has been told so must not pass for its result.
        """
        if not self.is_unwanted(now_s):
            return False
        self.was_cancelled = True
        return True


class Answering(Protocol):
    """Tells callers the outcomes of their calls. Both methods may raise anything."""

    def reply(self, peer: Any, number: int, result: Any, context_id: int) -> None:
        """Answers call ``number`` with a result."""

    def reply_error(self, peer: Any, number: int, error: BaseException) -> None:
        """Answers call ``number`` with an error."""


class AnsweredCall(ServedCall, ABC):
    """A call that is told its outcome by being called with it.

    Attributes:
        worker: Sends answers. It is called at once, for an action would cost each call too much.
        context_id: The autograd context in which it runs, or 0.
        owned: The value of this worker that the outcome becomes; None where a caller waits.
    """

    __slots__ = ("context_id", "owned", "worker")

    worker: Answering
    context_id: int
    owned: Any

    @abstractmethod
    def create(self, creation: int) -> bool:
        """Has the outcome become a value here; ends the call where that is not to be made.

        Returns:
            Whether the value is to be made: not where it was before, or where nobody wants it.
        """

    @abstractmethod
    def keep(self, result: Any, error: BaseException | None) -> None:
        """Makes the outcome the value ``owned``, which is None afterwards."""

    @abstractmethod
    def cannot_tell(self, failure: BaseException) -> None:
        """Tells, as far as possible, that telling the outcome has failed."""

    @abstractmethod
    def is_referred_to(self) -> bool:
        """Whether somebody holds a reference to the value that it makes."""

    def begins(self, creation: int, remaining_s: float, now_s: float) -> bool:
        """Decides whether to run it, now that it is its turn; if not, it has ended. Hot path.

        Args:
            creation: The number of the value that it makes, or ``NO_CREATION``.
            remaining_s: How long its caller waited still when the request was made.
            now_s: The time.
        """
        if creation != NO_CREATION:
            return self.create(creation)
        self.deadline_s = self.arrived_s + remaining_s
        # As ``is_unwanted``, without calling it.
        if self.was_cancelled or now_s > self.deadline_s or self.peer.lost is not None:
            self.end()
            return False
        return True

    def __call__(self, result: Any, error: BaseException | None) -> None:
        """Ends it with its outcome. Hot path."""
        try:
            if self.owned is not None:
                self.keep(result, error)
            elif self.was_cancelled or self.has_ended:
                pass  # Nobody waits. What the result refers to was not handed on yet.
            elif error is None:
                self.worker.reply(self.peer, self.number, result, self.context_id)
            else:
                self.worker.reply_error(self.peer, self.number, error)
        except BaseException as failure:
            self.cannot_tell(failure)
        # As ``end``, without calling it.
        if self.number and not self.has_ended:
            del self.peer.served[self.number]
        self.has_ended = True
        self._on_cancel = None

    def is_unwanted(self, now_s: float) -> bool:
        """Whether nobody waits for it; where it makes a value, whether nobody can want that."""
        if self.number:
            return super().is_unwanted(now_s)
        return self.peer.lost is not None and not self.is_referred_to()


class CancelNested(NamedTuple):
    """An action: soon, end the calls nested in those of ``take_cancelled_parents``.

    Later, for all that come meanwhile at once: that goes through all open calls.
    """


class CallServer:
    """Cancels the calls that one worker serves. All of it is rare events."""

    def __init__(self) -> None:
        self._cancelled_parents: deque[ServedCall] = deque()

    def cancel_received(self, caller: Caller, numbers: Iterable[int]) -> list[CancelNested]:
        """A caller waits for some of its calls no longer. Those not known have ended."""
        found = map(caller.served.get, numbers)
        return self.cancel([call for call in found if call is not None])

    def caller_lost(self, caller: Caller) -> list[CancelNested]:
        """A caller is lost, and waits for nothing."""
        return self.cancel(list(caller.served.copy().values()))

    def creations_lost(self, making: Iterable[AnsweredCall], caller: Caller) -> list[CancelNested]:
        """A lost caller wants none of the values in ``making``; perhaps others refer to them."""
        return self.cancel(
            [call for call in making if call.peer is caller and call.is_unwanted(0.0)]
        )

    def cancel(self, calls: Iterable[ServedCall]) -> list[CancelNested]:
        """Cancels calls, and soon those that are nested in them."""
        for call in calls:
            call.cancel()
            if call.has_nested:
                self._cancelled_parents.append(call)
        return [CancelNested()] if self._cancelled_parents else []

    def take_cancelled_parents(self) -> set[ServedCall]:
        """Returns the calls, cancelled since the last time, whose nested calls have to end."""
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
