"""Batched calls: many callers' arguments are stacked, a function runs once, each gets its row.

``batched`` decorates a function. Each function, or each object whose method it is, has a queue,
which gathers its calls, runs them in batches, and counts them. See ``docs/protocols/batching.md``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, ParamSpec, TypeVar, overload

import numpy as np
import torch

from torchweft.arguments import checked_int, wrong_type
from torchweft.autograd.contexts import current_id
from torchweft.errors import (
    ArgumentTypeError,
    CallCancelled,
    CallTimeout,
    ConfigurationError,
    QueueFull,
)
from torchweft.protocol.batching import LAST, NOTHING, REFUSE, Batcher, Request
from torchweft.protocol.served_calls import SLOW_S, AnsweredCall, ServedCall
from torchweft.rpc.current_call import TAKEN, remaining_time
from torchweft.rpc.handles import Handle
from torchweft.rpc.stacking import (
    Entry,
    Keywords,
    Options,
    Outcome,
    Parts,
    Runner,
    Waiting,
    take_apart,
)
from torchweft.rpc.worker import WORKER
from torchweft.serialize.exceptions import fresh_copy
from torchweft.serialize.functions import resolve
from torchweft.serialize.registry import rebuilds_plain
from torchweft.threads import device_streams
from torchweft.threads.device_streams import Mark
from torchweft.threads.reactor import LAST as RUN_LAST
from torchweft.threads.reactor import OWN
from torchweft.threads.reports import log_exception
from torchweft.threads.timers import Timer
from torchweft.wire.messages import NO_GRAD
from torchweft.worker import current as current_agent
from torchweft.worker.agent import Agent, Slot
from torchweft.worker.calls import current_call

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
    mixed: bool = ...,
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
    mixed: bool = False,
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
        limit: How many calls may wait. Further remote calls are refused with ``QueueFull``; a local
            thread waits for room.
        pad: If given, tensors of different sizes are filled up with it, at the end of each
            dimension, to the largest of the batch. The result is not cropped.
        mixed: Whether calls that cannot be stacked form batches of their own. If not, calls that
            differ from most of their batch fail with ``BatchError``.
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
    options = Options(largest, smallest, longest_wait, limit, pad, mixed, isolate)
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


_Queues = dict[int, tuple[Callable[[], object], "BatchQueue"]]
"""Queues by the id of their object, with a weak reference to it."""


class _Batches:
    """The queues of one batched function: one for each object whose method it is."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._options = options
        self._name = getattr(function, "__qualname__", repr(function))
        self._signature = inspect.signature(function)
        names = list(self._signature.parameters)
        self._is_method = bool(names) and names[0] in _OF_OBJECTS
        kinds = [each.kind for each in self._signature.parameters.values()]
        is_plain = all(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        self._plain_count = len(names) if is_plain else -1
        self._lock = threading.Lock()
        self._runner = Runner(function, self._name, options)
        self._running = threading.RLock()
        """For calls without a group: one batch at a time; the function may call itself."""
        self.is_by_value = False
        """Whether another process has sent the function, and may send it again."""
        self._queues: Slot[_Queues] = Slot(dict)
        """Of each worker that this process becomes: they end with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_value, (self._function, self._options)

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
        owner = bound[0] if bound else None
        queues = agent.slots[self._queues]
        found = queues.get(id(owner))
        if found is not None and found[0]() is owner:
            return found[1]
        if self.is_by_value and not queues:  # It may have come with one call, and go with it.
            weakref.finalize(self, agent.slots.pop, self._queues, None).atexit = False
        with self._lock:
            found = queues.get(id(owner))
            if found is None or found[0]() is not owner:
                if self.is_by_value and (owner is None or inspect.isclass(owner)):
                    self._warn_if_again()
                queue = BatchQueue(self._function, self._name, self._options, agent)
                found = queues[id(owner)] = (self._reference_to(owner, queues), queue)
            return found[1]

    def _warn_if_again(self) -> None:
        """Warns, once, of a function that comes with its calls: each time with a new queue."""
        name = f"{self._function.__module__}.{self._name}"
        count = _sent[name] = _sent.get(name, 0) + 1
        if count == 2:
            _log.warning(
                "%s is batched, and its calls run one by one: a function of the main program "
                "travels with each call, so no two calls are of the same function here. Define it "
                "in a module that the workers import, or make it a method of an object that one "
                "of them has",
                name,
            )

    def _reference_to(self, owner: object, queues: _Queues) -> Callable[[], object]:
        if owner is None:
            return lambda: None
        key = id(owner)

        def forget(reference: object) -> None:
            found = queues.get(key)
            if found is not None and found[0] is reference:
                del queues[key]

        try:
            return weakref.ref(owner, forget)
        except TypeError:
            raise ArgumentTypeError(
                f"{self._name} is batched, so its objects need weak references: add '__weakref__' "
                f"to the __slots__ of {type(owner).__qualname__}"
            ) from None

    def expect(self, owner: object, count: int) -> None:
        """Sets how many calls make a batch in the queue of one object, or of the function."""
        self._check_owner(owner)
        if current_agent.is_set():
            bound = (owner,) if self._is_method else ()
            queue = self._queue_of(bound, current_agent.current())
            queue.expect(min(count, self._options.largest))

    def statistics(self, owner: object) -> BatchStatistics:
        """Returns the statistics of the queue of one object, or of the function."""
        self._check_owner(owner)
        if not current_agent.is_set():
            return BatchStatistics()
        queues = current_agent.current().slots[self._queues]
        found = queues.get(id(owner if self._is_method else None))
        return BatchStatistics() if found is None else found[1].statistics()

    def _check_owner(self, owner: object) -> None:
        """Refuses a method without its object, which has no queue."""
        if self._is_method and owner is None:
            raise ArgumentTypeError(
                f"{self._name} is a method, and each object has a queue of its own; pass the "
                "method of an object, as in server.classify, or to batch_statistics also of="
            )

    def _result(self, bound: tuple[Any, ...], parts: Parts) -> Any:
        """Makes a call by a thread of this worker, and waits for its result."""
        context_id = current_id() if torch.is_grad_enabled() else NO_GRAD
        if current_agent.is_set():
            call = self._call_in_group(current_agent.current(), context_id, bound, parts)
        else:
            call = LocalCall(SimpleNamespace(name="this process"), context_id)
            with self._running:
                ((result, error),) = self._runner.outcomes([Entry(call, bound, parts, 0.0)])
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
        queue = self._queue_of(bound, agent)
        limit_s = min(agent.default_timeout_s, remaining_time())
        deadline_s = time.monotonic() + limit_s
        with agent.reactor.waiting():
            if queue.put_or_wait(call, bound, parts, deadline_s) and call.wait(deadline_s):
                return call
        raise CallTimeout(
            f"the batched call of {self._name} on its own worker had no result within "
            f"{limit_s:.1f} s",
            worker=agent.info.name,
            call=self._name,
            elapsed_s=limit_s,
        )


_sent: dict[str, int] = {}
"""How often functions have come that have no object, by name."""


def _by_value(function: Callable[..., Any], options: Options) -> _Batches:
    """Makes the queues of a function that has come from another process."""
    found = _Batches(function, options)
    found.is_by_value = True
    return found


# The queue


@rebuilds_plain
@dataclass(frozen=True)
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


_SORTED_AT: Final = 4096
"""Waits that are kept until they are counted, many at once."""


def _bound_s(key: int) -> float:
    """Returns the time at which a wait is counted: its binary exponent, and eighths of it."""
    return math.ldexp(key & 15, (key >> 4) - 3)


class Counts:
    """The statistics of a queue, while they grow; the queue keeps its threads apart."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._new_waits_s = array("d")
        self._waits: dict[int, int] = {}
        self._wait_s = self._longest_wait_s = self.run_s = 0.0
        self.failed = self.refused = self.left = 0

    def add_batch(self, waits_s: Sequence[float]) -> None:
        """Counts a batch by the times that its calls have waited. Hot path."""
        size = len(waits_s)
        self.sizes[size] = self.sizes.get(size, 0) + 1
        self._new_waits_s.extend(waits_s)
        if len(self._new_waits_s) > _SORTED_AT:
            self._sort()

    def _sort(self) -> None:
        """Counts the waits since the last time by their bounds."""
        waits_s = np.frombuffer(self._new_waits_s)
        self._new_waits_s = array("d")
        mantissas, exponents = np.frexp(waits_s)
        keys = (exponents.astype(np.int64) << 4) + np.ceil(8 * mantissas).astype(np.int64)
        distinct, counts = np.unique(keys, return_counts=True)
        for key, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._waits[key] = self._waits.get(key, 0) + count
        self._wait_s += float(waits_s.sum())
        self._longest_wait_s = max(self._longest_wait_s, float(waits_s.max(initial=0.0)))

    def add_run(self, run_s: float, failed: int) -> None:
        """Counts the run of a batch."""
        self.run_s += run_s
        self.failed += failed

    def snapshot(self, waiting: int) -> BatchStatistics:
        """Returns the statistics so far."""
        self._sort()
        sizes = dict(self.sizes)
        waits: dict[float, int] = {}
        for key, count in self._waits.items():  # Of a bound there may be two keys.
            waits[_bound_s(key)] = waits.get(_bound_s(key), 0) + count
        return BatchStatistics(
            batches=sum(sizes.values()),
            sizes=sizes,
            wait_s=self._wait_s,
            longest_wait_s=self._longest_wait_s,
            waits=waits,
            run_s=self.run_s,
            waiting=waiting,
            failed=self.failed,
            refused=self.refused,
            left=self.left,
        )


_TRY_AGAIN_S = 1.0


class BatchQueue:
    """Gathers the calls of one function, or of one object's method, and runs them in batches.

    Args:
        function: Called with stacked arguments.
        name: Its name, for messages.
        options: The options of the decorator.
        agent: The worker's agent.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, options: Options, agent: Agent
    ) -> None:
        self._name = name
        self._limit = options.limit
        self._agent = agent
        self._worker = agent.slots[WORKER]
        self._runner = Runner(function, name, options, self._worker)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._entries: dict[Waiting, Entry] = {}
        self._batcher = Batcher(
            options.largest, options.smallest, options.longest_wait_s, options.limit
        )
        self._clock = agent.slots[_CLOCKS].of(agent)
        self._watched_s = math.inf
        """The time that the clock was told last."""
        self._is_slow = False
        self._runs_in = 0
        """The thread that runs a batch, or 0."""
        self._counts = Counts()

    # Arrival

    def put(self, call: AnsweredCall, bound: tuple[Any, ...], parts: Parts) -> None:
        """Adds a served call, which ends with its outcome later; refuses it if too many wait.

        Args:
            call: The call.
            bound: The object whose method is called, or nothing.
            parts: The other arguments.
        """
        with self._lock:
            request = self._add(call, bound, parts)
            self._counts.refused += request is REFUSE
        if request is REFUSE:
            call(None, self._full())
            return
        call.on_cancel(self._leave)
        self._carry_out(request)  # This thread looks at the tasks next.

    def put_or_wait(
        self, call: LocalCall, bound: tuple[Any, ...], parts: Parts, deadline_s: float
    ) -> bool:
        """Does as ``put`` for a thread of this worker, but waits for room; False if too late.

        Raises:
            ConfigurationError: The thread runs a batch of this queue.
        """
        if self._worker.carrier is not None:
            call.context = self._worker.carrier.context_here()
        if threading.get_ident() == self._runs_in:
            raise ConfigurationError(
                f"{self._name} is called within a batch of its own, and would wait for itself; "
                "move the common part to a function that is not batched"
            )
        with self._room:
            while self._batcher.is_full:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._room.wait(None if math.isinf(left_s) else left_s):
                    return False
            request = self._add(call, bound, parts)
        self._carry_out(request)
        self._agent.reactor.wake()
        return True

    def _add(self, call: Waiting, bound: tuple[Any, ...], parts: Parts) -> Request:
        now_s = time.monotonic()
        request = self._batcher.arrived(call, now_s)
        if request is not REFUSE:
            mark = device_streams.mark() if device_streams.HAS_CUDA else None
            self._entries[call] = Entry(call, bound, parts, now_s, mark)
        return request

    def _full(self) -> QueueFull:
        worker = self._agent.info.name
        return QueueFull(
            f"{self._limit} calls of {self._name} wait on worker {worker!r}, which refuses "
            "more; wait for some answers before the next call, or raise limit= of batched there",
            worker=worker,
            call=self._name,
        )

    def _leave(self, call: Waiting) -> None:
        """Takes a call out whose caller has given it up; does nothing to one that runs."""
        with self._lock:
            if not self._batcher.left(call):
                return
            entry = self._entries.pop(call)
            self._counts.left += 1
            self._room.notify()
        self._agent.reactor.submit(_end_left, entry)

    def expect(self, smallest: int) -> None:
        """Changes how many calls must wait for a batch to be closed before the longest wait."""
        with self._lock:
            request = self._batcher.expect(smallest, time.monotonic())
        if request is not NOTHING:
            self._carry_out(request)
            self._agent.reactor.wake()

    def statistics(self) -> BatchStatistics:
        """Returns what the queue has done so far."""
        with self._lock:
            return self._counts.snapshot(len(self._batcher))

    # Turns

    def _carry_out(self, request: Request) -> None:
        if request is not NOTHING:
            reactor = self._agent.reactor
            reactor.tasks.append((self._turn, None, None), RUN_LAST if request is LAST else OWN)
        wake_s = self._batcher.wake_s
        if wake_s != self._watched_s:
            self._watched_s = wake_s
            if wake_s != math.inf:
                self._clock.watch(self)

    @property
    def wake_s(self) -> float:
        """When to look at the clock; infinity for never."""
        return self._batcher.wake_s

    def woken(self, now_s: float) -> float:
        """Looks at the clock; returns when to look again."""
        with self._lock:
            request = NOTHING
            if now_s >= self._batcher.wake_s:
                request = self._batcher.woken(now_s)
            wake_s = self._batcher.wake_s
        if request is not NOTHING:
            self._agent.reactor.submit_task(self._turn)
        return wake_s

    def _turn(self, _: object, __: object) -> None:
        now_s = time.monotonic()
        with self._lock:
            batch = list(map(self._entries.pop, self._batcher.turn(now_s)))
            if batch:
                self._room.notify_all()
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
        entries: list[Entry] = []
        left: list[Entry] = []
        for entry in batch:
            (left if entry.call.is_unwanted(now_s) else entries).append(entry)
        if left:
            with self._lock:
                self._counts.left += len(left)
            for entry in left:
                _end_left(entry, None)
        if not entries:
            return
        if self._is_slow:
            self._agent.reactor.arm_all()  # Others need not wait for this thread.
        self._counts.add_batch([now_s - entry.arrived_s for entry in entries])
        outcomes = self._runner.outcomes(entries)
        run_s = time.monotonic() - now_s
        self._is_slow = run_s > SLOW_S
        self._counts.add_run(run_s, sum(error is not None for _, error in outcomes))
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

    def wait(self, deadline_s: float) -> bool:
        """Waits for the outcome; gives the call up if it does not come in time."""
        left_s = deadline_s - time.monotonic()
        is_there = self._ended.wait(None if math.isinf(left_s) else max(left_s, 0.0))
        self._is_given_up = not is_there
        return is_there

    def is_unwanted(self, now_s: float) -> bool:
        """Whether its thread has given it up; noticed when the batch is closed."""
        return self._is_given_up


class _Clock:
    """Wakes the queues of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[BatchQueue, float] = {}
        self._timer: Timer | None = None

    def of(self, agent: Agent) -> _Clock:
        """Returns this clock, running by the timer thread of the agent."""
        with self._lock:
            if self._timer is None:
                self._timer = agent.timers.add(self._tick)
        return self

    def watch(self, queue: BatchQueue) -> None:
        """Has a queue woken when it is due."""
        assert self._timer is not None
        wake_s = queue.wake_s
        if self._queues.get(queue, math.inf) > wake_s:
            with self._lock:
                self._queues[queue] = wake_s
            self._timer.wake_by(wake_s)

    def _tick(self, now_s: float) -> float:
        with self._lock:
            due = [queue for queue, wake_s in self._queues.items() if wake_s <= now_s]
            for queue in due:
                del self._queues[queue]
        for queue in due:
            try:
                wake_s = queue.woken(now_s)
            except Exception:  # The other queues are woken nevertheless.
                log_exception("a queue of batched calls could not be woken; it is tried again")
                wake_s = now_s + _TRY_AGAIN_S
            if wake_s != math.inf:
                with self._lock:
                    self._queues[queue] = min(wake_s, self._queues.get(queue, math.inf))
        with self._lock:
            return min(self._queues.values(), default=math.inf)


_CLOCKS: Slot[_Clock] = Slot(_Clock)
