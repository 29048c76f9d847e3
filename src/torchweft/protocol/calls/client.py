"""The calls that one worker makes: from request to answer, or to the error that ends them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torchweft.protocol.calls import failures
from torchweft.protocol.calls.server import ServedCall
from torchweft.protocol.calls.table import CallTable, Named, OpenCall
from torchweft.wire.frames import Frame

Call = TypeVar("Call", bound=OpenCall)


@dataclass(slots=True)
class Complete(Generic[Call]):
    """An action: ``call`` has ended with its ``error``; tell those that wait for it."""

    call: Call


class TellCancelled(NamedTuple):
    """An action: tell ``worker`` that nobody waits for the calls with these numbers any more."""

    worker: int
    numbers: tuple[int, ...]


Action = Complete[Call] | TellCancelled
"""Every action of the machine."""


class Completion(Generic[Call]):
    """How far the main thread has come in completing the future of a call, each part in one step.

    Args:
        call: The call.
        on_done: Completes the future. Called again where it was interrupted.
    """

    __slots__ = ("call", "consumed", "on_done", "taken")

    def __init__(self, call: Call, on_done: Callable[[Call], None]) -> None:
        self.call = call
        self.on_done = on_done
        self.consumed: list[int] = []
        """The size of the answer, once nobody else will read it."""
        self.taken: list[Call | None] = []
        """What was in the table of calls under its number."""


class CallClient(CallTable[Call]):
    """The open calls of one worker. Thread-safe, by single steps.

    Hot path: ``add``, ``take``, ``pop``, ``answered``, ``completions``.

    Attributes:
        completions: Futures that the main thread completes now, by the numbers of their calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.completions: dict[int, Completion[Call]] = {}
        # By their numbers, the calls that wait for a connection: they were not sent.
        self._unsent: dict[int, bool] = {}

    def answered(self, frame: Frame) -> Call | None:
        """Ends a call with its answer. Hot path.

        Returns:
            The call, which is to be completed; None where the answer comes too late.
        """
        call = self.pop(frame.id, None)
        if call is not None:
            call.frame = frame
        return call

    # The request

    def keep(self, call: Call) -> int:
        """As ``add``, for a call whose request waits for the first connection.

        ``sending`` or ``not_sent`` follows.
        """
        number = call.number = next(self._numbers)
        self._unsent[number] = False
        self._entries[number] = call
        self.total = number
        return number

    def sending(self, call: Call) -> None:
        """There is a connection, and the request is sent next.

        Raises:
            CallCancelled: The call has ended meanwhile, and its callee was not told: do not send.
        """
        if self._unsent.pop(call.number, None) is None:
            raise failures.ended_unsent(call)

    def not_sent(self, call: Call, error: BaseException) -> list[Action[Call]]:
        """The request will not be sent: the call ends with ``error``, unless it has ended."""
        return self._end(self._taken(call), lambda _, __: error, is_told=False)

    def withdraw(self, call: Call) -> bool:
        """The request could not be made or sent: the maker of the call raises the error.

        Returns:
            Whether the call was open.
        """
        self._unsent.pop(call.number, None)
        return self.take(call.number) is not None

    def opened(self, call: Call, *, was_sent: bool) -> list[Action[Call]]:
        """Looks again, after the request was written, where the call or its parent has ended.

        The thread that cancelled the parent has looked for nested calls, perhaps before this one
        was there. The thread that ended this call has told the callee of that, perhaps before the
        request was sent, so the callee did not know the call.
        """
        parent = call.parent
        if parent is not None and parent.was_cancelled and (taken := self._taken(call)):
            return self._end(taken, _parent_cancelled)
        if call.error is not None and was_sent:
            return [TellCancelled(call.worker, (call.number,))]
        return []

    # Ends other than by an answer

    def expire(self, now_s: float) -> tuple[list[Action[Call]], float]:
        """Ends the calls whose time is up; also returns when the next one's will be."""
        expired, earliest_s = self.take_expired(now_s)
        return self._time_out(expired, now_s), earliest_s

    def timed_out(self, call: Call, now_s: float) -> list[Action[Call]]:
        """Ends a call whose time is up, unless it has ended."""
        return self._time_out(self._taken(call), now_s)

    def cancelled(self, call: Call, error: BaseException) -> list[Action[Call]]:
        """Nobody wants a call any more: it ends with ``error``. No actions where it has ended."""
        return self._end(self._taken(call), lambda _, __: error)

    def parents_cancelled(self, parents: Set[ServedCall]) -> list[Action[Call]]:
        """Ends the calls that were made in the course of cancelled ones."""
        return self._end(self.take_where(lambda call: call.parent in parents), _parent_cancelled)

    def worker_lost(
        self, worker: int, make_error: Callable[[], BaseException]
    ) -> list[Action[Call]]:
        """Ends the calls to a lost worker, each with an error of its own."""
        return self._end(self.take_of_worker(worker), lambda _, __: make_error(), is_told=False)

    def closed(self, error: BaseException) -> list[Action[Call]]:
        """Ends all calls: this worker has left."""
        return self._end(self.take_all(), lambda _, __: error, is_told=False)

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
        """Ends calls that were taken from the table; tells callees, if they know the calls."""
        actions: list[Action[Call]] = []
        sent: defaultdict[int, list[int]] = defaultdict(list)
        for call in calls:
            was_sent = self._unsent.pop(call.number, True)
            call.error = make_error(call, was_sent)
            actions.append(Complete(call))
            if was_sent and is_told:
                sent[call.worker].append(call.number)
        actions += [TellCancelled(worker, tuple(numbers)) for worker, numbers in sent.items()]
        return actions

    # Futures that the main thread completes, wherever it is interrupted

    def interrupted(self, completion: Completion[Call]) -> bool:
        """The main thread has left a completion, or will not come back to it.

        Returns:
            Whether another thread has to ``resume`` it: nobody else will read its answer.
        """
        if completion.consumed:
            return True
        self.completions.pop(completion.call.number, None)
        return False

    def resume(self, completion: Completion[Call]) -> Call | None:
        """Takes over a completion; returns its call if that is to be completed here.

        It was interrupted before it took the call from its table, or after that.
        """
        call = completion.call
        if self.completions.pop(call.number, None) is None:
            return None  # Another thread has taken it over.
        if self.take(call.number) is not None:
            completion.taken.append(call)
        return call if completion.taken == [call] else None


def _parent_cancelled(call: OpenCall, _: bool) -> BaseException:
    assert call.parent is not None
    return failures.parent_cancelled(call.parent, call.worker_name, call.function)


def nest(
    parent: ServedCall, worker_name: str, function: Named, limit_s: float, now_s: float
) -> tuple[ServedCall | None, float]:
    """Returns the parent of a call that is made now, and how long the call may take.

    Args:
        parent: The call that the running code serves. One that has been answered is no parent.
        worker_name: The callee.
        function: What is called.
        limit_s: How long the call may take at most.
        now_s: The time.

    Raises:
        CallCancelled: The caller of ``parent`` has given up.
        CallTimeout: It has no time left.
    """
    if parent.has_ended and not parent.was_cancelled:
        return None, limit_s
    # First: the thread that cancels the parent looks at this after it has set ``was_cancelled``.
    parent.has_nested = True
    left_s = parent.deadline_s - now_s
    if left_s < 0:
        raise failures.not_called_in_time(parent, worker_name, function)
    if parent.is_unwanted(now_s):
        raise failures.parent_cancelled(parent, worker_name, function)
    return parent, min(limit_s, left_s)
