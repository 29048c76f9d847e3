"""``batched``: the decorator, and what programs ask of functions that have it."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import torch

from torchweft.arguments import checked_int, wrong_type
from torchweft.autograd.contexts import current_id
from torchweft.errors import ArgumentTypeError, CallTimeout, ConfigurationError
from torchweft.protocol.served_calls import ServedCall
from torchweft.rpc.batching.queue import BatchQueue, BatchStatistics, LocalCall
from torchweft.rpc.batching.running import Entry, Keywords, Options, Runner
from torchweft.rpc.batching.stacking import Parts, take_apart
from torchweft.rpc.current_call import TAKEN, remaining_time
from torchweft.rpc.handles import Handle
from torchweft.serialize.exceptions import fresh_copy
from torchweft.serialize.functions import resolve
from torchweft.threads import device_streams
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
    batches = getattr(function, _BATCHES, None)
    if not isinstance(batches, _Batches):
        raise wrong_type("function", function, "pass a function that batched decorates")
    return batches.statistics(getattr(function, "__self__", of))


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
    batches = getattr(function, _BATCHES, None)
    if not isinstance(batches, _Batches):
        raise wrong_type("function", function, "pass a function that batched decorates")
    if count < 1:
        raise ConfigurationError(f"a batch cannot wait for {count} calls; pass 1 or more")
    batches.expect(getattr(function, "__self__", None), count)


_Queues = dict[int, tuple[Callable[[], object], BatchQueue]]
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
            return _nothing
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
            call = LocalCall(_ALONE, context_id)
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


class _Alone(NamedTuple):
    """The caller in a process that is no worker."""

    name: str


_ALONE = _Alone("this process")


def _nothing() -> None:
    """The owner of the queue of a plain function."""
