"""Decides how each call of this worker ends, and which workers are told.

The problem: a call may be answered, time out, be cancelled, and lose its worker or its caller, all
at the same time on different threads; and its nested calls have to end with it. A lock around all
of that would cost more than a small call.

The idea: a call is one entry of a table. The thread that removes the entry, in one atomic step (a
single C function), ends the call. So it ends once, without a lock.

Guarantees, see ``docs/protocols/calls.md``: **Once**, a function runs at most once for a call;
**Bounded**, a call ends by its answer, its timeout, or the loss of its worker; **In vain**, no
function begins after its caller has stopped waiting, and nested calls end with their parent.

The rules of this file: every call takes the
*hot path*: the data, and the few methods marked so, which return no actions. All other methods are
rare events and may return actions. Any thread may call any method at any time. Single operations
rely on the atomicity of ``dict``. ``copy`` is atomic. Iterating over ``items`` is not: a garbage
collection may start in between, run finalizers, and let other threads run.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torchweft import knobs
from torchweft.engine.protocol.sessions import Outgoing, Unsent
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import NO_CREATION, NO_GRAD
from torchweft.errors import (
    CallCancelled,
    CallTimeout,
    ConfigurationError,
    ProtocolError,
    QueueFull,
    SerializationError,
)
from torchweft.free_threading import shared_count

# The callee's side: the calls of other workers, from arrival to end. A caller cancels a call by its
# number, while the call waits in its queue, runs, or has ended. So a call is registered under its
# number from the moment it is read until it has ended: a ``CANCEL`` finds its call unless that is
# over, so no ``CANCEL`` has to be remembered. Calls that a served function makes are *nested* in
# its call: they get no more than its remaining time, and end with it.

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


class AnsweredCall(ServedCall, ABC):
    """A served call that is invoked with its outcome.

    A value that it makes is delivered even where its caller no longer waits: other workers may
    refer to the value by now.

    Attributes:
        worker: Sends answers, by ``reply`` and ``reply_error``, which may raise any exception; has
            the ``unfinished`` calls, whose outcomes become values, and the ``watchers`` of calls.
            Invoked directly: an action would cost each call too much.
        context_id: The autograd context in which it runs, or 0.
        owned: The owned value that the outcome becomes; None if a caller waits.
        notes: What watchers keep with the call; unset if there were none at its begin.
    """

    __slots__ = ("context_id", "notes", "owned", "worker")

    worker: Any
    context_id: int
    owned: Any
    notes: dict[Any, Any]

    @property
    def own_context_id(self) -> int:
        """The autograd context that the request names; 0 if none, or if it is not decoded yet."""
        context_id = getattr(self, "context_id", 0)
        return 0 if context_id == NO_GRAD else context_id

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


class CallServer:
    """Cancels the calls that one worker serves. All methods are rare events.

    A method that returns True asks for the end of the calls nested in ``take_cancelled_parents``,
    soon: so one scan of all open calls serves several cancelled parents.
    """

    def __init__(self) -> None:
        self._cancelled_parents: deque[ServedCall] = deque()

    def cancel_received(self, caller: Caller, numbers: Iterable[int]) -> bool:
        """Cancels calls of a caller by their numbers; unknown numbers have ended."""
        found = map(caller.served.get, numbers)
        return self.cancel([call for call in found if call is not None])

    def caller_lost(self, caller: Caller) -> bool:
        """Cancels all calls of a lost caller."""
        return self.cancel(list(caller.served.copy().values()))

    def creations_lost(self, making: Iterable[AnsweredCall], caller: Caller) -> bool:
        """Cancels a lost caller's calls in ``making`` to whose values no reference is held."""
        return self.cancel(
            [call for call in making if call.peer is caller and call.is_unwanted(0.0)]
        )

    def cancel(self, calls: Iterable[ServedCall]) -> bool:
        """Cancels calls now, and the calls nested in them soon."""
        for call in calls:
            call.cancel()
            if call.has_nested:
                self._cancelled_parents.append(call)
        return bool(self._cancelled_parents)

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


# The caller's side: one call, the errors by which calls end, and the table of open calls

Subject = tuple[Any, ...]
"""A function that returns a name for the called function, followed by its own arguments."""
Named = str | bytes | Subject | Callable[..., Any]
"""The called function, or its name."""


class OpenCall:
    """One call: the callee, the time limit, and the outcome once there is one.

    The shell's subclass knows the time and how to wait, and sets the attributes.

    Attributes:
        worker: The callee.
        worker_name: The callee's name.
        function: The called function, or its name.
        timeout_s: The time limit.
        started_s: When the call was made.
        deadline_s: When its time is up.
        parent: The served call that it is nested in, or None.
        number: Its number at the callee, set by ``add`` or ``keep``.
        frame: The answer.
        error: The error that ended it.
        on_done: Completes its future; None if it has no future, or if that was completed.
    """

    __slots__ = (
        "deadline_s",
        "error",
        "frame",
        "function",
        "number",
        "on_done",
        "parent",
        "started_s",
        "timeout_s",
        "worker",
        "worker_name",
    )

    worker: int
    worker_name: str
    function: Named
    timeout_s: float
    started_s: float
    deadline_s: float
    parent: ServedCall | None
    number: int
    frame: Frame | None
    error: BaseException | None
    on_done: Callable[[Any], None] | None


# The errors by which calls end, each with its true reason


_ROUNDING_S = 1e-6
"""Rounding tolerance for comparing deadlines."""


def timed_out(call: OpenCall, now_s: float, was_sent: bool) -> CallTimeout:
    """Returns the error of a call whose time is up.

    Args:
        call: The call.
        now_s: The time.
        was_sent: Whether there was a connection to send it over.
    """
    name, parent = function_name(call.function), call.parent
    text = (
        f"RPC ran for more than set timeout ({call.timeout_s * 1e3:.0f} ms) and will now be "
        f"marked with an error: {name} on worker {call.worker_name!r}; "
    )
    if parent is not None and call.deadline_s >= parent.deadline_s - _ROUNDING_S:
        text += _late_with(parent)
    elif not was_sent:
        text += (
            "it was not sent: that worker has not answered the attempt to connect to it. It is "
            "stopped or busy, or the network is slow"
        )
    else:
        text += (
            "the worker may still be running it. Pass a longer timeout= if the function needs "
            "the time"
        )
    elapsed_s = now_s - call.started_s
    return CallTimeout(text, worker=call.worker_name, call=name, elapsed_s=elapsed_s)


def not_called_in_time(parent: ServedCall, worker_name: str, function: Named) -> CallTimeout:
    """Returns the error of a nested call for which no time is left."""
    name = function_name(function)
    text = f"{name} on worker {worker_name!r} was not called: {_late_with(parent)}"
    return CallTimeout(text, worker=worker_name, call=name)


def _late_with(parent: ServedCall) -> str:
    return (
        f"the limit was that of worker {parent.peer.name!r}, for whose call it was made and which "
        "waits no longer. Pass a longer timeout= there"
    )


def parent_cancelled(parent: ServedCall, worker_name: str, function: Named) -> CallCancelled:
    """Returns the error of a nested call whose parent was cancelled."""
    name, caller = function_name(function), parent.peer.name
    return CallCancelled(
        f"{name} on worker {worker_name!r} was called for worker {caller!r}, which has given up or "
        "is lost; call it within torchweft.rpc.detached() if it is to run all the same",
        worker=worker_name,
        call=name,
    )


def interrupted(call: OpenCall) -> CallCancelled:
    """Returns the error of a call whose caller was interrupted while it read the answer."""
    name = function_name(call.function)
    return CallCancelled(
        f"the caller was interrupted while it read the answer of {name} on worker "
        f"{call.worker_name!r}, which is lost",
        worker=call.worker_name,
        call=name,
    )


def ended_unsent(call: OpenCall) -> CallCancelled:
    """Returns the error of a request that is not sent because its call has ended."""
    name = function_name(call.function)
    text = f"the call of {name} on worker {call.worker_name!r} ended before it was sent"
    return CallCancelled(text, worker=call.worker_name, call=name)


def too_many_waiting(worker_name: str, caller_name: str) -> QueueFull:
    """Returns the error of a call that its callee refuses, as too many calls wait there."""
    return QueueFull(
        f"worker {worker_name!r} has too many calls of worker {caller_name!r} waiting and refuses "
        "more; wait for some answers before the next call, or raise "
        f"{knobs.QUEUE_LIMIT_CALLS.variable} or {knobs.QUEUE_LIMIT_BYTES.variable} there",
        worker=worker_name,
    )


def not_sendable(worker_name: str, failure: BaseException) -> SerializationError:
    """Returns the error of a call whose result its callee could not send."""
    return SerializationError(
        f"worker {worker_name!r} could not send the result of the call: {type(failure).__name__} "
        "was raised meanwhile; its log says more"
    )


def no_future(function: str, result: object) -> ConfigurationError:
    """Returns the error of a function that must return a future, and returned ``result``."""
    return ConfigurationError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
        f"but {function}, marked by async_execution, returned a {type(result).__name__}"
    )


def function_name(function: Named) -> str:
    """Returns a readable name of the called function, for messages."""
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


# The calls that one worker makes, from request to answer or error


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


class CallClient(Generic[Call]):
    """The open calls that one worker has made, by number. Thread-safe by atomic steps.

    Numbers are never used twice. Hot path: ``add``, ``pop``, ``answered``.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Call] = {}
        """The open calls by their numbers."""
        self.pop: Callable[[int, None], Call | None] = self.entries.pop
        """Removes and returns a call, in one atomic step (a single C function); None if it was
        taken before or never existed."""
        self._numbers = shared_count(1)
        self.total = 0
        """Roughly how many calls were made; changes with each call."""
        # By number, the calls that were not sent because they wait for a connection.
        self._unsent: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, call: Call) -> int:
        """Adds ``call`` and returns its number."""
        number = call.number = next(self._numbers)
        self.entries[number] = call
        self.total = number
        return number

    def all(self) -> list[Call]:
        """Returns the open calls."""
        return list(self.entries.copy().values())

    def take_expired(self, now_s: float) -> tuple[list[Call], float]:
        """Removes the calls whose deadline has passed.

        Returns:
            The expired calls, and the earliest deadline among the others (or infinity).
        """
        expired: list[Call] = []
        earliest_s = math.inf
        for number, call in self.entries.copy().items():
            if call.deadline_s > now_s:
                earliest_s = min(earliest_s, call.deadline_s)
            elif self.pop(number, None) is not None:
                expired.append(call)
        return expired, earliest_s

    def take_where(self, is_meant: Callable[[Call], bool]) -> list[Call]:
        """Removes and returns the calls that satisfy ``is_meant``; scans the whole table."""
        numbers = [number for number, call in self.entries.copy().items() if is_meant(call)]
        taken = [self.pop(number, None) for number in numbers]
        return [call for call in taken if call is not None]

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
        call = self.entries.get(frame.id)
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
        self.entries[number] = call
        self.total = number
        return number

    def sending(self, call: Call) -> None:
        """Notes that there is a connection and that the request is sent next.

        Raises:
            CallCancelled: The call has ended meanwhile, and its callee was not told: do not send.
        """
        if self._unsent.pop(call.number, None) is None:
            raise ended_unsent(call)

    def not_sent(self, call: Call, error: BaseException) -> list[Action[Call]]:
        """Ends a call that will not be sent with ``error``, unless it has ended."""
        return self._end(self._taken(call), lambda _, __: error, is_told=False)

    def withdraw(self, call: Call) -> bool:
        """Removes a call whose request could not be made or sent; its maker raises the error.

        Returns:
            Whether the call was open.
        """
        self._unsent.pop(call.number, None)
        return self.pop(call.number, None) is not None

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
        actions = self._end(expired, lambda call, was_sent: timed_out(call, now_s, was_sent))
        return actions, earliest_s

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
        return self._end(
            self.take_where(lambda call: call.worker == worker),
            lambda _, __: make_error(),
            is_told=False,
        )

    def closed(self, error: BaseException) -> list[Call]:
        """Ends all calls, because this worker has left; returns them to be completed."""
        calls = self.take_where(lambda _: True)
        self._end(calls, lambda _, __: error, is_told=False)
        return calls

    def _taken(self, call: Call) -> list[Call]:
        return [call] if self.pop(call.number, None) is not None else []

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
    return parent_cancelled(call.parent, call.worker_name, call.function)


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
        raise not_called_in_time(parent, worker_name, function)
    if parent.is_unwanted(now_s):
        raise parent_cancelled(parent, worker_name, function)
    return parent, min(limit_s, left_s)


# Calls that are kept until there is a first connection to their callee


class Request(Protocol):
    """The request that opens a call."""

    def message(self, number: int) -> Outgoing:
        """Returns the frame, given the number of the call."""

    def take_back(self) -> None:
        """Takes back what the frame hands on (references, graph records): it is not sent."""


class SimpleRequest:
    """A request that hands nothing on.

    Args:
        message: Makes the frame, given the number of the call.
    """

    def __init__(self, message: Callable[[int], Outgoing]) -> None:
        self.message = message

    def take_back(self) -> None:
        """Does nothing."""


class KeptCall(Unsent, Generic[Call]):
    """The request of a call, which is sent once there is a connection, unless the call has ended.

    Args:
        client: Has the call, by ``keep``.
        call: The call.
        request: Its request.
        act: Carries out actions of ``client``.
    """

    def __init__(
        self,
        client: CallClient[Call],
        call: Call,
        request: Request,
        act: Callable[[list[Action[Call]]], None],
    ) -> None:
        self._client = client
        self._call = call
        self._request = request
        self._act = act

    def make(self) -> Outgoing:
        """Returns the request; raises CallCancelled if the call has ended."""
        self._client.sending(self._call)
        return self._request.message(self._call.number)

    def is_wanted(self) -> bool:
        """Whether the call is open."""
        return self._call.number in self._client.entries

    def drop(self, error: Exception | None) -> None:
        """Takes the request back, and ends the call with ``error``; None if it has ended."""
        self._request.take_back()
        if error is not None:
            self._act(self._client.not_sent(self._call, error))
