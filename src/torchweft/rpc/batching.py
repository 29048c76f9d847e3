"""Batched calls: many callers' arguments are stacked, a function runs once, each gets its row.

``batched`` decorates a function. Each function, or each object whose method it is, has a queue,
which gathers its calls, runs them in batches, and counts them. ``Batcher`` decides when waiting
calls become a batch; it knows no thread and no clock. See ``docs/protocols/batching.md``.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, overload

import torch

from torchweft.arguments import checked_int, wrong_type
from torchweft.autograd.contexts import current_id
from torchweft.engine.codec.exceptions import fresh_copy
from torchweft.engine.codec.functions import resolve
from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.engine.protocol.calls import SLOW_S, AnsweredCall, ServedCall
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.reactor import LAST as RUN_LAST
from torchweft.engine.threads.reactor import OWN
from torchweft.engine.threads.timers import Timer
from torchweft.engine.wire.messages import NO_GRAD
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.references import Handle
from torchweft.errors import (
    ArgumentTypeError,
    CallCancelled,
    CallTimeout,
    ConfigurationError,
    QueueFull,
)
from torchweft.rpc.serving import TAKEN, remaining_time
from torchweft.rpc.stacking import (
    BatchedCall,
    Entry,
    Keywords,
    Options,
    Outcome,
    Parts,
    Runner,
    take_apart,
)
from torchweft.rpc.worker import WORKER

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("torchweft")

_BATCHES = "_weft_batches"
_OF_OBJECTS = ("self", "cls")


@overload
def batched(function: Callable[P, T]) -> Callable[P, T]: ...


@overload
def batched(
    *,
    largest: int = ...,
    smallest: int = ...,
    longest_wait: float = ...,
    limit: int = ...,
    pad: float | None = ...,
    isolate: bool = ...,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def batched(
    function: Callable[..., Any] | None = None,
    *,
    largest: int = 64,
    smallest: int = 1,
    longest_wait: float = 0.005,
    limit: int = 4096,
    pad: float | None = None,
    isolate: bool = False,
) -> Any:
    """Gathers the calls of many callers, stacks their arguments, and runs the function once.

    Tensors in the arguments, also in nested tuples, lists and dicts, are stacked along a new first
    dimension; anything else becomes a list with an entry for each call. Each tensor of the result
    must have a row for each call. Other parts of the result go to every caller. A caller passes the
    arguments of one call and gets its row, by ``rpc_sync``, ``rpc_async``, ``remote``, or a local
    call, which blocks. Without a group, a local call runs at once as a batch of its own.

    A function whose first parameter is named ``self`` or ``cls`` is a method: each object has its
    own queue. With ``@staticmethod`` or ``@classmethod`` this decorator is the inner one. One
    batch of a queue runs at a time, on a thread of the worker, outside of any autograd context;
    the gradients of each caller flow as if its call had run alone. See
    ``docs/protocols/batching.md`` for the rules and the limits.

    Args:
        function: The function, if the decorator has no arguments.
        largest: The most calls in a batch.
        smallest: How many calls must wait before a batch runs, unless one of them has waited for
            ``longest_wait``. With 1, a batch is what has come while the former one ran.
        longest_wait: How long a call waits for others, in seconds.
        limit: How many calls may wait. Further calls of other workers are refused with
            ``QueueFull``; a thread of this worker waits in any case.
        pad: If given, tensors of different sizes are filled up with it, at the end of each
            dimension, to the largest of the batch. The result is not cropped.
        isolate: Whether a batch that fails runs again in halves, so that only the calls at fault
            fail. For functions without effects.

    Raises:
        ConfigurationError: An option is out of range.
        ArgumentTypeError: An option is of another type, or the function returns a coroutine or a
            generator.

    Example::

        class Agent:
            @functions.batched(largest=64, longest_wait=0.002)
            def act(self, states: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    return self.policy(states).argmax(dim=1)
    """
    options = Options(largest, smallest, longest_wait, limit, pad, isolate)
    _check(options)
    if function is None:
        return functools.partial(_decorated, options=options)
    return _decorated(function, options)


def _check(options: Options) -> None:
    largest, smallest, longest_wait_s, limit, pad, *_ = options
    for name, count in (("largest", largest), ("smallest", smallest), ("limit", limit)):
        checked_int(name, count)
    for name, number in (("longest_wait", longest_wait_s), ("pad", 0 if pad is None else pad)):
        if not isinstance(number, (int, float)):
            raise wrong_type(name, number, "pass a number")
    if not 1 <= smallest <= largest <= limit:
        raise ConfigurationError(
            f"batched(smallest={smallest}, largest={largest}, limit={limit}): they must be at "
            "least 1, and in ascending order"
        )
    if not 0 <= longest_wait_s < math.inf:
        raise ConfigurationError(
            f"batched(longest_wait={longest_wait_s}): pass seconds, 0 or more and finite"
        )


def _decorated(function: Callable[..., Any], options: Options) -> Callable[..., Any]:
    if not callable(function) or isinstance(function, (staticmethod, classmethod)):
        raise wrong_type("function", function, "write @batched below @staticmethod or @classmethod")
    if inspect.iscoroutinefunction(function):
        raise ArgumentTypeError(
            f"{function.__qualname__} is an async def; a batched function computes its result"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ArgumentTypeError(
            f"{function.__qualname__} is a generator; a batched function returns its result"
        )
    batches = _Batches(function, options)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Only this, as the code of a wrapper may travel by value.
        return batches.answer(args, kwargs)

    setattr(wrapper, _BATCHES, batches)
    return wrapper


def batch_statistics(function: Callable[..., Any], of: Any = None) -> BatchStatistics:
    """Returns what a batched function has done so far on this worker. Thread-safe.

    From another worker: ``rpc_sync("server", functions.batch_statistics, (classify,))``.

    Nothing where this process is no worker.

    Args:
        function: A batched function, or a method: of an object (``agent.act``), or of a class
            (``Agent.act``) with ``of``.
        of: The object whose method it is, or a reference to it.

    Raises:
        ArgumentTypeError: The function is not batched, or is a method and its object is missing.
    """
    if isinstance(of, Handle):
        of = of.local_value()  # type: ignore[attr-defined]
    if of is not None:
        # Its own: a function that came by value has no queues.
        function = getattr(of, getattr(function, "__name__", ""), function)
    return _batches_of(function).statistics(getattr(function, "__self__", of))


def expect_calls(function: Callable[..., Any], count: int) -> None:
    """Changes ``smallest`` of a batched function on this worker: how many calls make a batch.

    For a server that knows how many callers there are now. A full batch then runs at once, and a
    caller that is lost does not keep the others waiting. Does nothing in a process that is no
    worker. Thread-safe; does not block.

    Args:
        function: A batched function, or a method of an object (``agent.act``).
        count: How many calls a batch waits for, for at most ``longest_wait``; at least 1. More than
            ``largest`` count as ``largest``.

    Raises:
        ArgumentTypeError: The function is not batched, or is a method without its object.
        ConfigurationError: ``count`` is not at least 1.
    """
    batches = _batches_of(function)
    if count < 1:
        raise ConfigurationError(f"a batch cannot wait for {count} calls; pass 1 or more")
    batches.expect(getattr(function, "__self__", None), count)


def _batches_of(function: Any) -> _Batches:
    batches = getattr(function, _BATCHES, None)
    if not isinstance(batches, _Batches):
        raise wrong_type("function", function, "pass a function that batched decorates")
    return batches


class _Batches:
    """One batched function: its calls, in a queue for each object whose method it is."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self.function = function
        self.options = options
        self.name = getattr(function, "__qualname__", repr(function))
        self.is_by_value = False
        """Whether another process has sent the function, and may send it again."""
        self._signature = inspect.signature(function)
        names = list(self._signature.parameters)
        self._is_method = bool(names) and names[0] in _OF_OBJECTS
        kinds = [each.kind for each in self._signature.parameters.values()]
        is_plain = all(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        self._plain_count = len(names) if is_plain else -1
        self._running = threading.RLock()
        """For calls without a group: one batch at a time; the function may call itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_value, (self.function, self.options)

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call, or ``TAKEN`` if it is one of another worker.

        Raises:
            TypeError: The arguments do not fit the signature.
            Exception: The error of a local call.
        """
        bound, parts = self._parts_of(args, kwargs)
        call: Any = current_call.get()
        if call is not None and self._is_called_by(call):
            self._queue_of(bound, call.worker.agent).put(call, bound, parts)
            return TAKEN
        return self._result(bound, parts)

    def _is_called_by(self, call: ServedCall) -> bool:
        """Whether a served call is one of this function, and not of another that calls it."""
        called = call.function
        if type(called) is bytes:
            called = resolve(called)
        return getattr(called, _BATCHES, None) is self and not call.has_ended

    def _parts_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Parts]:
        """Returns the object whose method is called, and the other arguments, normalized."""
        if kwargs or len(args) != self._plain_count:
            normal = self._signature.bind(*args, **kwargs)
            normal.apply_defaults()
            args = normal.args
            if normal.kwargs:
                args = (*args, Keywords(normal.kwargs))
        if self._is_method:
            return args[:1], take_apart(args[1:])
        return (), take_apart(args)

    def _queue_of(self, bound: tuple[Any, ...], agent: Agent) -> BatchQueue:
        return agent.slots[_QUEUES].of(self, bound[0] if bound else self, agent)

    def expect(self, owner: object, count: int) -> None:
        """Sets how many calls make a batch in the queue of one object, or of the function."""
        self._check_owner(owner)
        if current_agent.is_set():
            bound = (owner,) if self._is_method else ()
            queue = self._queue_of(bound, current_agent.current())
            queue.expect(min(count, self.options.largest))

    def statistics(self, owner: object) -> BatchStatistics:
        """Returns the statistics of the queue of one object, or of the function."""
        self._check_owner(owner)
        queue = None
        if current_agent.is_set():
            queues = current_agent.current().slots[_QUEUES]
            queue = queues.find(self, owner if self._is_method else self)
        return BatchStatistics() if queue is None else queue.statistics()

    def _check_owner(self, owner: object) -> None:
        """Refuses a method without its object, which has no queue."""
        if self._is_method and owner is None:
            raise ArgumentTypeError(
                f"{self.name} is a method, and each object has a queue of its own; pass the "
                "method of an object, as in server.classify, or to batch_statistics also of="
            )

    def _result(self, bound: tuple[Any, ...], parts: Parts) -> Any:
        """Makes a call by a thread of this worker, and waits for its result."""
        context_id = current_id() if torch.is_grad_enabled() else NO_GRAD
        if current_agent.is_set():
            call = self._call_in_group(current_agent.current(), context_id, bound, parts)
        else:
            call = LocalCall(SimpleNamespace(name="this process"), context_id)
            runner = Runner(self.function, self.name, self.options)
            with self._running:
                ((result, error),) = runner.outcomes([Entry(call, bound, parts, 0.0)])
            call(result, error)
        assert call.outcome is not None
        result, error = call.outcome
        if error is not None:
            raise fresh_copy(error)
        device_streams.use(call.mark, result)
        return result

    def _call_in_group(
        self, agent: Agent, context_id: int, bound: tuple[Any, ...], parts: Parts
    ) -> LocalCall:
        call = LocalCall(agent.me, context_id)
        limit_s = min(agent.default_timeout_s, remaining_time())
        self._queue_of(bound, agent).put(call, bound, parts)
        with agent.reactor.waiting():
            if call.wait(limit_s):
                return call
        raise CallTimeout(
            f"the batched call of {self.name} on its own worker had no result within "
            f"{limit_s:.1f} s",
            worker=agent.info.name,
            call=self.name,
            elapsed_s=limit_s,
        )


def _by_value(function: Callable[..., Any], options: Options) -> _Batches:
    """Makes a batched function that has come from another process."""
    found = _Batches(function, options)
    found.is_by_value = True
    return found


# Statistics


@rebuilds_plain
@dataclass
class BatchStatistics:
    """What a batched function, or one object's batched method, has done so far.

    Attributes:
        batches: How many batches were closed.
        sizes: How many of them had each size.
        wait_s: Seconds that calls waited for their batch to be closed, all together.
        longest_wait_s: The longest of these times.
        waits: How many calls waited, by the time: by upper bounds in seconds, which exceed a call's
            time by less than a quarter.
        run_s: Seconds that the batches ran, all together.
        waiting: How many calls wait now.
        failed: Calls that ended with an error.
        refused: Calls that were refused because too many waited.
        left: Calls that left the queue because their callers no longer waited.
    """

    batches: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    wait_s: float = 0.0
    longest_wait_s: float = 0.0
    waits: dict[float, int] = field(default_factory=dict)
    run_s: float = 0.0
    waiting: int = 0
    failed: int = 0
    refused: int = 0
    left: int = 0

    @property
    def calls(self) -> int:
        """How many calls were in these batches."""
        return sum(size * count for size, count in self.sizes.items())

    @property
    def mean_size(self) -> float:
        """How many calls a batch had on average; 0 before the first."""
        return self.calls / self.batches if self.batches else 0.0

    @property
    def mean_wait_s(self) -> float:
        """How long a call waited on average, in seconds; 0 before the first."""
        return self.wait_s / self.calls if self.batches else 0.0

    def size_percentile(self, percent: float) -> int:
        """Returns the size that so many percent of the batches do not exceed; 0 before the first.

        Raises:
            ConfigurationError: ``percent`` is not between 0 and 100.
        """
        return _percentile(self.sizes, percent) if self.sizes else 0

    def wait_percentile_s(self, percent: float) -> float:
        """Returns the time that so many percent of the calls waited at most, in seconds.

        It is too long by a quarter at most; 0 before the first batch.

        Raises:
            ConfigurationError: ``percent`` is not between 0 and 100.
        """
        found = _percentile(self.waits, percent) if self.waits else 0.0
        return min(found, self.longest_wait_s)


Number = TypeVar("Number", int, float)


def _percentile(counts: dict[Number, int], percent: float) -> Number:
    if not 0 <= percent <= 100:
        raise ConfigurationError(f"{percent} percent: pass a number from 0 to 100")
    needed = percent / 100 * sum(counts.values())
    reached = 0
    for value in sorted(counts):
        reached += counts[value]
        if reached >= needed:
            break
    return value


def count_batch(found: BatchStatistics, waits_s: Sequence[float]) -> None:
    """Counts a batch by the times that its calls have waited. Hot path."""
    size = len(waits_s)
    found.batches += 1
    found.sizes[size] = found.sizes.get(size, 0) + 1
    found.wait_s += sum(waits_s)
    found.longest_wait_s = max(found.longest_wait_s, *waits_s)
    for wait_s in waits_s:
        mantissa, exponent = math.frexp(wait_s)
        bound_s = math.ldexp(math.ceil(8 * mantissa), exponent - 3)
        found.waits[bound_s] = found.waits.get(bound_s, 0) + 1


# When waiting calls become a batch. Calls and time go in, requests for a turn come out:
#
# - The shell gives a turn that was requested exactly once, sooner or later. It may give more turns:
#   a turn closes a batch only if one is due. So a late or doubled turn does no harm.
# - At most one turn of each kind is requested at a time, and none while a batch runs: the end of
#   the batch requests the next.
# - A call is in the queue from ``arrived`` until ``left``, or until ``turn`` returns it.
# - After every event but ``left`` the shell reads ``wake_s``; at that time it calls ``woken``.


class Request(enum.Enum):
    """What the shell has to do after an event."""

    NOTHING = enum.auto()
    SOON = enum.auto()
    """Give a turn soon: a batch is due."""
    LAST = enum.auto()
    """Give a turn when no message waits to be handled: more calls may be among them."""


NOTHING, SOON, LAST = Request


class Batcher:
    """Decides when the calls of one queue become a batch. Not thread-safe.

    Args:
        largest: How many calls a batch has at most.
        smallest: How many calls must wait for a batch to be closed, before ``longest_wait_s``.
        longest_wait_s: How long a call waits for others, in seconds.

    Attributes:
        wake_s: When to look at the clock; infinity for never. Never moves to an earlier time
            except from infinity.
        is_running: Whether a batch runs.
    """

    def __init__(self, largest: int, smallest: int, longest_wait_s: float) -> None:
        self._largest = largest
        self._smallest = smallest
        self._longest_wait_s = longest_wait_s
        self._waiting: dict[Any, float] = {}
        self._has_asked_soon = self._has_asked_last = False
        self.is_running = False
        self.wake_s = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def arrived(self, call: object, now_s: float) -> Request:
        """A call has come, which is not equal to any that waits. Hot path."""
        self._waiting[call] = now_s
        return self._next(now_s)

    def expect(self, smallest: int, now_s: float) -> Request:
        """From now on, this many calls must wait for a batch to be closed early."""
        self._smallest = smallest
        return self._next(now_s)

    def left(self, call: object) -> bool:
        """A call has been given up; returns whether it was waiting."""
        return self._waiting.pop(call, None) is not None

    def turn(self, now_s: float) -> list[Any]:
        """A turn: returns the calls of a batch that runs from now on, or nothing."""
        self._has_asked_soon = self._has_asked_last = False
        waiting = self._waiting
        if self.is_running or not waiting:
            return []
        due_s = self._due_s()
        if len(waiting) < self._smallest and now_s < due_s:
            self._wake_by(due_s)
            return []
        self.is_running = True
        calls = list(waiting)[: self._largest]
        for call in calls:
            del waiting[call]
        return calls

    def ended(self, now_s: float) -> Request:
        """The batch has ended."""
        self.is_running = False
        return self._next(now_s)

    def woken(self, now_s: float) -> Request:
        """The shell has looked at the clock, at ``wake_s`` or later."""
        self.wake_s = math.inf
        return self._next(now_s)

    def _next(self, now_s: float) -> Request:
        """Returns the request for a turn that is missing, if any."""
        count = len(self._waiting)
        if self.is_running or self._has_asked_soon or not count:
            return NOTHING  # The end of the batch, the turn, or the next call sees to it.
        due_s = self._due_s()
        if count >= self._largest or now_s >= due_s:
            self._has_asked_soon = True
            return SOON
        self._wake_by(due_s)
        if count >= self._smallest and not self._has_asked_last:
            self._has_asked_last = True
            return LAST
        return NOTHING

    def _due_s(self) -> float:
        """Returns when the first call has waited long enough."""
        return next(iter(self._waiting.values())) + self._longest_wait_s

    def _wake_by(self, due_s: float) -> None:
        # Calls come in the order of time: an earlier wake-up finds what is due then.
        if self.wake_s == math.inf:
            self.wake_s = due_s


class BatchQueue:
    """Gathers the calls of one function, or of one object's method, and runs them in batches.

    Args:
        batches: The function. The queue does not hold this object, which may end with the calls.
        agent: The worker's agent.
        timer: Wakes the queues of the worker.
    """

    def __init__(self, batches: _Batches, agent: Agent, timer: Timer) -> None:
        self.function = batches.function
        self._name = batches.name
        self._agent = agent
        self._timer = timer
        self._worker = agent.slots[WORKER]
        options = batches.options
        self._limit = options.limit
        self._runner = Runner(self.function, self._name, options, self._worker)
        self._lock = threading.Lock()
        self._entries: dict[BatchedCall, Entry] = {}
        self._batcher = Batcher(options.largest, options.smallest, options.longest_wait_s)
        self._is_slow = False
        self._runs_in = 0
        """The thread that runs a batch, or 0."""
        self._statistics = BatchStatistics()

    # Arrival

    def put(self, call: AnsweredCall | LocalCall, bound: tuple[Any, ...], parts: Parts) -> None:
        """Adds a call, which ends with its outcome later.

        Refuses a call of another worker if too many wait. A thread of this worker waits in any
        case, and can wait for one call only.

        Args:
            call: The call.
            bound: The object whose method is called, or nothing.
            parts: The other arguments.

        Raises:
            ConfigurationError: A thread that runs a batch of this queue makes the call.
        """
        if isinstance(call, LocalCall):
            if threading.get_ident() == self._runs_in:
                raise ConfigurationError(
                    f"{self._name} is called within a batch of its own, and would wait for itself; "
                    "move the common part to a function that is not batched"
                )
            if self._worker.carrier is not None:
                call.context = self._worker.carrier.context_here()
        with self._lock:
            is_refused = len(self._batcher) >= self._limit and not isinstance(call, LocalCall)
            if is_refused:
                self._statistics.refused += 1
            else:
                now_s = time.monotonic()
                mark = device_streams.mark() if device_streams.HAS_CUDA else None
                self._entries[call] = Entry(call, bound, parts, now_s, mark)
                request = self._batcher.arrived(call, now_s)
        if is_refused:
            call(None, self._full())
        elif isinstance(call, LocalCall):
            self._carry_out(request)
            self._agent.reactor.wake()
        else:
            call.on_cancel(self._leave)
            self._carry_out(request)  # This thread looks at the tasks next.

    def _full(self) -> QueueFull:
        worker = self._agent.info.name
        return QueueFull(
            f"{self._limit} calls of {self._name} wait on worker {worker!r}, which refuses "
            "more; wait for some answers before the next call, or raise limit= of batched there",
            worker=worker,
            call=self._name,
        )

    def _leave(self, call: BatchedCall) -> None:
        """Takes a call out whose caller has given it up; does nothing to one that runs."""
        with self._lock:
            if not self._batcher.left(call):
                return
            entry = self._entries.pop(call)
            self._statistics.left += 1
        self._agent.reactor.submit(_end_left, entry)

    def expect(self, smallest: int) -> None:
        """Changes how many calls must wait for a batch to be closed before the longest wait."""
        with self._lock:
            request = self._batcher.expect(smallest, time.monotonic())
        self._carry_out(request)
        self._agent.reactor.wake()

    def statistics(self) -> BatchStatistics:
        """Returns what the queue has done so far."""
        with self._lock:
            found, waiting = self._statistics, len(self._batcher)
            return replace(found, sizes=dict(found.sizes), waits=dict(found.waits), waiting=waiting)

    # Turns

    def _carry_out(self, request: Request) -> None:
        if request is not NOTHING:
            reactor = self._agent.reactor
            reactor.tasks.append((self._turn, None, None), RUN_LAST if request is LAST else OWN)
        self._timer.wake_by(self._batcher.wake_s)

    def woken(self, now_s: float) -> float:
        """Looks at the clock; returns when to look again."""
        # Race: a thread that sets an earlier time now asks the timer for it by itself.
        wake_s = self._batcher.wake_s
        if now_s < wake_s:
            return wake_s
        with self._lock:
            request = self._batcher.woken(now_s)
            wake_s = self._batcher.wake_s
        if request is not NOTHING:
            self._agent.reactor.submit_task(self._turn)
        return wake_s

    def _turn(self, _: object, __: object) -> None:
        now_s = time.monotonic()
        with self._lock:
            batch = list(map(self._entries.pop, self._batcher.turn(now_s)))
        if not batch:
            self._carry_out(NOTHING)  # Calls that left may have changed when to look at the clock.
            return
        self._runs_in = threading.get_ident()
        try:
            self._run_batch(batch, now_s)
        finally:
            self._runs_in = 0
            with self._lock:
                request = self._batcher.ended(time.monotonic())
            self._carry_out(request)

    def _run_batch(self, batch: list[Entry], now_s: float) -> None:
        left: list[Entry] = []
        entries: list[Entry] = []
        for entry in batch:
            (left if entry.call.is_unwanted(now_s) else entries).append(entry)
        with self._lock:
            self._statistics.left += len(left)
            if entries:
                count_batch(self._statistics, [now_s - entry.arrived_s for entry in entries])
        for entry in left:
            _end_left(entry, None)
        if not entries:
            return
        if self._is_slow:
            self._agent.reactor.arm_all()  # Others need not wait for this thread.
        outcomes = self._runner.outcomes(entries)
        run_s = time.monotonic() - now_s
        self._is_slow = run_s > SLOW_S
        with self._lock:
            self._statistics.run_s += run_s
            self._statistics.failed += sum(error is not None for _, error in outcomes)
        for entry, (result, error) in zip(entries, outcomes, strict=True):
            entry.call(result, error)


def _end_left(entry: Entry, _: object) -> None:
    entry.call(None, CallCancelled("the caller no longer waits for this call"))


class LocalCall:
    """A call by a thread of this worker, which waits for it."""

    def __init__(self, peer: Any, context_id: int) -> None:
        self.peer = peer
        self.context_id = context_id
        self.owned = self  # The result stays here.
        self.outcome: Outcome | None = None
        self.mark: Mark | None = None
        """The end of the GPU work that computes the result."""
        self.context: object = None
        """The context of the span in which it is made, while calls carry spans."""
        self._ended = threading.Event()
        self._is_given_up = False

    def __call__(self, result: Any, error: BaseException | None) -> None:
        """Ends the call with its outcome."""
        if device_streams.HAS_CUDA:
            self.mark = device_streams.mark()
        self.outcome = result, error
        self._ended.set()

    def wait(self, limit_s: float) -> bool:
        """Waits for the outcome; gives the call up if it does not come in time."""
        is_there = self._ended.wait(None if math.isinf(limit_s) else limit_s)
        self._is_given_up = not is_there
        return is_there

    def is_unwanted(self, now_s: float) -> bool:
        """Whether its thread has given it up; noticed when the batch is closed."""
        return self._is_given_up


class _Queues:
    """The queues of one worker, by function and object, which end with it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # A finalizer may make a queue at any point.
        self._queues: dict[tuple[int, int], tuple[weakref.ref[object], BatchQueue]] = {}
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def find(self, batches: _Batches, owner: object) -> BatchQueue | None:
        """Returns the queue of an object, or None. Hot path."""
        found = self._queues.get((id(batches), id(owner)))
        if found is None or found[0]() is not owner or found[1].function is not batches.function:
            return None
        return found[1]

    def of(self, batches: _Batches, owner: object, agent: Agent) -> BatchQueue:
        """Returns the queue of an object, or of a function without one, which is its own owner.

        Raises:
            ArgumentTypeError: The object cannot be referred to weakly.
        """
        queue = self.find(batches, owner)
        if queue is not None:
            return queue
        with self._lock:
            queue = self.find(batches, owner)
            if queue is None:
                if batches.is_by_value and (owner is batches or inspect.isclass(owner)):
                    _warn_if_again(batches)
                self._timer = self._timer or agent.timers.add(self._tick)
                queue = BatchQueue(batches, agent, self._timer)
                key = id(batches), id(owner)
                self._queues[key] = self._reference_to(owner, key, batches.name), queue
            return queue

    def _reference_to(self, owner: object, key: tuple[int, int], name: str) -> weakref.ref[object]:
        def forget(reference: object) -> None:
            found = self._queues.get(key)
            if found is not None and found[0] is reference:
                del self._queues[key]

        try:
            return weakref.ref(owner, forget)
        except TypeError:
            raise ArgumentTypeError(
                f"{name} is batched, so its objects need weak references: add '__weakref__' "
                f"to the __slots__ of {type(owner).__qualname__}"
            ) from None

    def _tick(self, now_s: float) -> float:
        queues = [queue for _, queue in self._queues.copy().values()]
        return min([queue.woken(now_s) for queue in queues], default=math.inf)


_QUEUES: Slot[_Queues] = Slot(_Queues)

_sent: dict[str, int] = {}
"""How often functions have come that have no object, by name."""


def _warn_if_again(batches: _Batches) -> None:
    """Warns, once, of a function that comes with its calls: each time with a new queue."""
    name = f"{batches.function.__module__}.{batches.name}"
    count = _sent[name] = _sent.get(name, 0) + 1
    if count == 2:
        _log.warning(
            "%s is batched, and its calls run one by one: a function of the main program "
            "travels with each call, so no two calls are of the same function here. Define it "
            "in a module that the workers import, or make it a method of an object that one "
            "of them has",
            name,
        )
