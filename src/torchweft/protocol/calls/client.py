"""The calls that one worker makes, from request to answer or error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torchweft.errors import ProtocolError
from torchweft.protocol.calls import failures
from torchweft.protocol.calls.server import ServedCall
from torchweft.protocol.calls.table import CallTable, Named, OpenCall
from torchweft.wire.frames import Frame

Call = TypeVar("Call", bound=OpenCall)


@dataclass(slots=True)
class Complete(Generic[Call]):
    """An action: ``call`` has ended with its ``error``; notify its waiters."""

    call: Call


class TellCancelled(NamedTuple):
    """An action: tell ``worker`` that the calls with these numbers are no longer awaited."""

    worker: int
    numbers: tuple[int, ...]


Action = Complete[Call] | TellCancelled
"""Every action of the machine."""


class CallClient(CallTable[Call]):
    """The open calls that one worker has made. Thread-safe by atomic steps.

    Hot path: ``add``, ``take``, ``pop``, ``answered``.
    """

    def __init__(self) -> None:
        super().__init__()
        # By number, the calls that were not sent because they wait for a connection.
        self._unsent: dict[int, bool] = {}

    def answered(self, worker: int, frame: Frame) -> Call | None:
        """Ends a call with its answer. Hot path.

        Args:
            worker: The worker that sent the answer.
            frame: The answer.

        Returns:
            The call, which is to be completed; None if the answer is late.

        Raises:
            ProtocolError: The call was made to another worker.
        """
        call = self.find(frame.id)
        if call is None:
            return None
        if call.worker != worker:
            raise ProtocolError(f"it answers call {frame.id}, which was made to another worker")
        call = self.pop(frame.id, None)
        if call is not None:
            call.frame = frame
        return call

    # The request

    def keep(self, call: Call) -> int:
        """Does as ``add``, for a call whose request waits for the first connection.

        ``sending`` or ``not_sent`` follows.
        """
        number = call.number = next(self._numbers)
        self._unsent[number] = False
        self._entries[number] = call
        self.total = number
        return number

    def sending(self, call: Call) -> None:
        """Notes that there is a connection and that the request is sent next.

        Raises:
            CallCancelled: The call has ended meanwhile, and its callee was not told: do not send.
        """
        if self._unsent.pop(call.number, None) is None:
            raise failures.ended_unsent(call)

    def not_sent(self, call: Call, error: BaseException) -> list[Action[Call]]:
        """Ends a call that will not be sent with ``error``, unless it has ended."""
        return self._end(self._taken(call), lambda _, __: error, is_told=False)

    def withdraw(self, call: Call) -> bool:
        """Removes a call whose request could not be made or sent; its maker raises the error.

        Returns:
            Whether the call was open.
        """
        self._unsent.pop(call.number, None)
        return self.take(call.number) is not None

    def opened(
        self, call: Call, *, was_sent: bool, loss: Callable[[], BaseException] | None = None
    ) -> list[Action[Call]]:
        """Checks again, after the request was written, whether the call has ended or has to end.

        Three races: the thread that declared the callee lost, or cancelled the parent, may have
        searched for calls to end before this one was added. The thread that ended this call may
        have told the callee before the request was sent, when the callee did not know the call.

        Args:
            call: The call.
            was_sent: Whether the request was sent, and not kept.
            loss: Returns the error of a lost callee; None if the callee is not lost.

        Raises:
            BaseException: That error, if the loss has not ended the call; it is withdrawn.
        """
        if loss is not None and self.withdraw(call):
            raise loss()
        parent = call.parent
        if parent is not None and parent.was_cancelled and (taken := self._taken(call)):
            return self._end(taken, _parent_cancelled)
        if call.error is not None and was_sent:
            return [TellCancelled(call.worker, (call.number,))]
        return []

    # Ends other than by an answer

    def expire(self, now_s: float) -> tuple[list[Action[Call]], float]:
        """Ends the calls whose time is up; also returns the earliest remaining deadline."""
        expired, earliest_s = self.take_expired(now_s)
        return self._time_out(expired, now_s), earliest_s

    def cancelled(self, call: Call, error: BaseException) -> list[Action[Call]]:
        """Ends a given-up call with ``error``; returns no actions if it has ended."""
        return self._end(self._taken(call), lambda _, __: error)

    def parents_cancelled(self, parents: Set[ServedCall]) -> list[Action[Call]]:
        """Ends the calls nested in cancelled calls."""
        return self._end(self.take_where(lambda call: call.parent in parents), _parent_cancelled)

    def worker_lost(
        self, worker: int, make_error: Callable[[], BaseException]
    ) -> list[Action[Call]]:
        """Ends the calls to a lost worker, each with an error of its own."""
        return self._end(self.take_of_worker(worker), lambda _, __: make_error(), is_told=False)

    def closed(self, error: BaseException) -> list[Call]:
        """Ends all calls, because this worker has left; returns them to be completed."""
        calls = self.take_all()
        self._end(calls, lambda _, __: error, is_told=False)
        return calls

    def _taken(self, call: Call) -> list[Call]:
        return [call] if self.take(call.number) is not None else []

    def _time_out(self, calls: list[Call], now_s: float) -> list[Action[Call]]:
        return self._end(calls, lambda call, was_sent: failures.timed_out(call, now_s, was_sent))

    def _end(
        self,
        calls: list[Call],
        make_error: Callable[[Call, bool], BaseException],
        *,
        is_told: bool = True,
    ) -> list[Action[Call]]:
        """Ends calls taken from the table; if ``is_told``, tells the callees of sent calls."""
        actions: list[Action[Call]] = []
        sent: defaultdict[int, list[int]] = defaultdict(list)
        for call in calls:
            was_sent = self._unsent.pop(call.number, True)
            try:
                call.error = make_error(call, was_sent)
            except Exception as error:  # The name of a function may be code of the program.
                call.error = error
            actions.append(Complete(call))
            if was_sent and is_told:
                sent[call.worker].append(call.number)
        actions += [TellCancelled(worker, tuple(numbers)) for worker, numbers in sent.items()]
        return actions


def _parent_cancelled(call: OpenCall, _: bool) -> BaseException:
    assert call.parent is not None
    return failures.parent_cancelled(call.parent, call.worker_name, call.function)


def nest(
    parent: ServedCall, worker_name: str, function: Named, limit_s: float, now_s: float
) -> tuple[ServedCall | None, float]:
    """Returns the parent of a new call, and how long the call may take.

    Args:
        parent: The call that the running code serves. An answered call is no parent.
        worker_name: The callee's name.
        function: The called function, or its name.
        limit_s: How long the call may take at most.
        now_s: The time.

    Raises:
        CallCancelled: The caller of ``parent`` has given up.
        CallTimeout: ``parent`` has no time left.
    """
    if parent.has_ended and not parent.was_cancelled:
        return None, limit_s
    # Set this first: the cancelling thread sets ``was_cancelled`` before it reads this.
    parent.has_nested = True
    left_s = parent.deadline_s - now_s
    if left_s < 0:
        raise failures.not_called_in_time(parent, worker_name, function)
    if parent.is_unwanted(now_s):
        raise failures.parent_cancelled(parent, worker_name, function)
    return parent, min(limit_s, left_s)
