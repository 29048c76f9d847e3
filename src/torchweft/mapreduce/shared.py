"""What a worker keeps for a map of which it runs parts: shared values, turns and changed buffers.

The caller packs the values that parts share once. A worker keeps them packed, and unpacks them anew
for each part, with clones of the tensors: no part sees another part's changes to its copy.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.autograd.contexts import current_id
from torchweft.engine.codec.functions import describe
from torchweft.engine.codec.objects import unpack
from torchweft.engine.codec.registry import rebuilds_plain, remotely_callable
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.tensor_messages import own_copy
from torchweft.errors import ArgumentTypeError, CallCancelled
from torchweft.mapreduce import trees
from torchweft.rpc.api import RRef
from torchweft.rpc.calls import start
from torchweft.rpc.serving import (
    ASYNC_MARK,
    WhenReady,
    check_called,
    check_types,
    is_cancelled,
    owned,
)
from torchweft.rpc.worker import current_worker

_LOOK_S = 0.5
"""How often a part that waits for its turn checks whether it was cancelled."""

Address = tuple[int, int, int]
"""The id of a reference, passed by a caller that keeps the reference alive meanwhile."""


@rebuilds_plain
class Slot:
    """Stands for a shared value in the arguments of a part.

    Args:
        number: The index of the shared value.
    """

    __slots__ = ("number",)
    __match_args__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[type[Slot], tuple[int]]:
        return Slot, (self.number,)


class Shared:
    """A function and shared values, packed.

    Args:
        payload: The packed pair of the function and the list of values.
        tensors: The tensors that were taken out of the pair.
        concurrency: How many parts may run at a time; other parts wait for their turn.
        is_own: Whether this worker has packed the payload, and may trust it.
    """

    __slots__ = ("_is_own", "_turns", "concurrency", "payload", "tensors")

    def __init__(
        self, payload: bytes, tensors: Sequence[Tensor], concurrency: int, *, is_own: bool
    ) -> None:
        self.payload = payload
        self.tensors = tensors
        self.concurrency = concurrency
        self._turns = Turns(concurrency)
        self._is_own = is_own

    def call(
        self, args: Any, kwargs: Any, number: int, after: int
    ) -> tuple[Callable[..., Any], Any]:
        """Calls the function in its turn, with copies of the values in place of the slots.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            number: The number of this part among the parts sent to this object.
            after: The number of the part that must get its turn first; or ``NOTHING``.

        Returns:
            The function and its result.
        """
        read: Callable[..., Any] = unpack if self._is_own else current_worker().reader.unpack
        function, values = read(self.payload, _copies(self.tensors), ())
        check_called(function)
        check_types(values=(values, list))
        served = current_call.get()
        if served is not None:  # By name: a function by value is another one for each part.
            served.function = describe(original(function)).encode()
        if _is_served_to_itself():
            args, kwargs = _own_arguments(args, kwargs)
        args, kwargs = _filled((args, kwargs), values)
        if isinstance(args, Tensor):
            # One of few bytes may have any number of rows.
            raise ArgumentTypeError("the arguments of a call are a tensor, and not a tuple")
        with self._turn(number, after):
            return function, function(*args, **kwargs)

    @contextlib.contextmanager
    def _turn(self, number: int, after: int) -> Iterator[None]:
        """Holds a turn for the block; a part that was sent ahead waits for its turn first."""
        if not self._turns.take(number, after):
            with current_worker().agent.reactor.waiting():
                has_turn = self._turns.wait(number, _LOOK_S, is_cancelled)
            if not has_turn:
                raise CallCancelled("the caller of the map does not want this part any more")
        try:
            yield
        finally:
            self._turns.give_back()


# Called by name: by the caller of a map, and by workers on one another.


@remotely_callable
def make(payload: bytes, tensors: Sequence[Tensor], concurrency: int) -> Shared:
    """Returns a ``Shared`` object of the values that the caller of a map has packed."""
    return _made(payload, tensors, concurrency, is_own=_is_served_to_itself())


def _made(payload: Any, tensors: Any, concurrency: Any, *, is_own: bool) -> Shared:
    check_types(
        payload=(payload, bytes), tensors=(tensors, (list, tuple)), concurrency=(concurrency, int)
    )
    for tensor in tensors:
        check_types(tensor=(tensor, Tensor))
    return Shared(payload, tensors, concurrency, is_own=is_own)


@remotely_callable
async def pull(parent: RRef[Shared]) -> Shared:
    """Returns a copy of another worker's ``Shared`` object; no thread waits for it meanwhile."""
    check_types(parent=(parent, RRef))
    address = tuple(parent.id)
    # Found by id: the name may by now belong to another worker, or to no worker.
    owner = parent.agent().peers[parent.id.owner]
    held: Any = await start(current_worker(), owner, content, (address,), {}, 0.0)
    payload, tensors, concurrency = held
    return _made(payload, tensors, concurrency, is_own=False)


@remotely_callable
def content(address: Address) -> WhenReady:
    """Returns the content of a ``Shared`` object of this worker."""

    def parts_of(value: Any) -> tuple[Callable[..., Any], Any]:
        shared = _checked(value)
        return content, (shared.payload, shared.tensors, shared.concurrency)

    return WhenReady(owned(address), parts_of)


@remotely_callable
def run(address: Address, args: Any, kwargs: Any, number: int, after: int) -> WhenReady:
    """Runs a part of a map with a ``Shared`` object of this worker."""
    check_types(number=(number, int), after=(after, int))
    return WhenReady(
        owned(address), lambda value: _checked(value).call(args, kwargs, number, after)
    )


def _checked(value: Any) -> Shared:
    # Other workers pass an id, and must not reach any other kind of value with it.
    if not isinstance(value, Shared):
        raise ArgumentTypeError(f"a part of a map was sent to a {type(value).__name__}")
    return value


def _filled(arguments: tuple[Any, Any], values: Sequence[Any]) -> tuple[Any, Any]:
    if not values:
        return arguments
    flat, spec = trees.flatten(arguments)
    args, kwargs = trees.unflatten(
        [values[leaf.number] if isinstance(leaf, Slot) else leaf for leaf in flat], spec
    )
    return args, kwargs


def _own_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns copies of arguments that a worker sent itself, whose tensors went by reference."""
    worker = current_worker()
    if worker.copies_own:
        return args, kwargs
    packed = worker.encoder.pack_for([worker.agent.me], (args, kwargs))
    copies: Any = unpack(packed.payload, _copies(packed.tensors), packed.externals)
    args, kwargs = copies
    return args, kwargs


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    context_id = current_id()
    keeps_graphs = current_worker().arrivals.keeps_graphs
    return [own_copy(each, context_id, keeps_graphs) for each in tensors]


def _is_served_to_itself() -> bool:
    served = current_call.get()
    return served is not None and served.peer.is_self


# Turns: a few parts run at a time; the others wait, and run in the order of the caller. A semaphore
# would give a turn to any thread that asks at the right moment. And two threads may read two
# messages, so a part that was sent ahead may arrive before the part that it follows. Hence it names
# that part, and gets no turn before that part has had its turn.

NOTHING = -1
"""In place of a part's number: there is no such part."""


class Turns:
    """Hands out turns. Thread-safe.

    Args:
        count: How many parts have a turn at a time.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int]] = []
        """The numbers of parts that wait, each with that of the part that it follows."""
        self._seen = {NOTHING}
        """The numbers of the parts that have a turn, or have had it."""

    def take(self, number: int, after: int = NOTHING) -> bool:
        """Takes a turn; returns False if the part has to ``wait`` in the queue."""
        with self._changed:
            self._queue.append((number, after))
            self._hand_out()
            return number in self._seen

    def wait(self, number: int, look_s: float, is_unwanted: Callable[[], bool]) -> bool:
        """Blocks until a part in the queue has its turn.

        Args:
            number: The number of the part.
            look_s: Seconds between two calls of ``is_unwanted``.
            is_unwanted: Whether the turn is not wanted any more.

        Returns:
            Whether the part has a turn; if not, it has left the queue.
        """
        with self._changed:
            while number not in self._seen and not is_unwanted():
                self._changed.wait(look_s)
            if not is_unwanted():
                return True
            if number in self._seen:
                self.give_back()
            else:
                self._queue = [each for each in self._queue if each[0] != number]
            return False

    def give_back(self) -> None:
        """Ends a turn, and passes it to the first part in the queue that may run."""
        with self._changed:
            self._free += 1
            self._hand_out()

    def _hand_out(self) -> None:
        while self._free:
            place = next((each for each in self._queue if each[1] in self._seen), None)
            if place is None:
                return
            self._queue.remove(place)
            self._seen.add(place[0])
            self._free -= 1
            self._changed.notify_all()


# Buffers of modules
#
# A part computes with a copy of the caller's module. BatchNorm's running statistics, and whatever
# else a module keeps in buffers, change in the copy. So the first part of a map returns the buffers
# that it has changed, and the caller's modules get them when the map completes. As under
# ``DistributedDataParallel``, the buffers of the other parts are dropped.


_WANTED = "torchweft buffers"
"""The keyword argument, which no function can have, of the part that returns its buffers."""

Changed = tuple[int, str, Tensor]
"""The number of a module among those of the part, the name of its buffer, and the new value."""


class Outcome(NamedTuple):
    """What the first part returns.

    Attributes:
        result: The result of the function.
        changed: The buffers that it has changed.
    """

    result: Any
    changed: list[Changed]


class Buffers:
    """The buffers of the modules that the first part of a map gets.

    Args:
        function: The function of the map.
        args: Positional arguments of the first part.
        kwargs: Keyword arguments of the first part.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._modules = _modules_in(function, args, kwargs)
        self.are_any = any(True for module in self._modules for _ in module.buffers())
        if self.are_any and hasattr(function, ASYNC_MARK):
            self.are_any = False
            if any(module.training for module in self._modules):
                warnings.warn(
                    f"{describe(function)} is an async_execution function, so the buffers of "
                    "modules that it changes in a map, such as BatchNorm's, are dropped; call a "
                    "function without that decorator, or model.eval() first",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function to run for each part."""
        return partial(_run, function) if self.are_any else function

    def wanted_with(self, kwargs: Any) -> Any:
        """Returns the keyword arguments of the part that is to return its buffers."""
        return {**(kwargs or {}), _WANTED: True} if self.are_any else kwargs

    def update(self, changed: Sequence[Changed]) -> None:
        """Gives the caller's modules the values that the first part has left."""
        for number, name, value in changed:
            place, _, leaf = name.rpartition(".")
            owner = self._modules[number].get_submodule(place)
            buffer = getattr(owner, leaf, None)
            if (
                isinstance(buffer, Tensor)
                and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
                and not buffer.is_inference()
            ):
                # Not counted as an in-place change, as those of BatchNorm itself are not.
                buffer.data.copy_(value)
            else:
                setattr(owner, leaf, value)


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program's function behind the one that ``Buffers.watched`` returned."""
    if isinstance(function, partial) and function.func is _run:
        watched: Callable[..., Any] = function.args[0]
        return watched
    return function


def _run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs a part; the first returns an ``Outcome``."""
    if not kwargs.pop(_WANTED, False):
        return function(*args, **kwargs)
    modules = _modules_in(function, args, kwargs)
    before = {key: (buffer, buffer.detach().clone()) for key, buffer in _buffers_of(modules)}
    result = function(*args, **kwargs)

    def outcome(result: Any) -> Outcome:
        changed = [
            (*key, buffer.detach())
            for key, buffer in _buffers_of(modules)
            if key not in before or not _is_same(buffer, *before[key])
        ]
        return Outcome(result, changed)

    async def awaited(coroutine: Any) -> Outcome:
        return outcome(await coroutine)

    return awaited(result) if isinstance(result, CoroutineType) else outcome(result)


def _buffers_of(modules: Sequence[nn.Module]) -> list[tuple[tuple[int, str], Tensor]]:
    return [
        ((number, name), buffer)
        for number, module in enumerate(modules)
        for name, buffer in module.named_buffers()
        if not buffer.requires_grad
    ]


def _is_same(buffer: Tensor, earlier: Tensor, content: Tensor) -> bool:
    if buffer is not earlier and (buffer.shape, buffer.dtype) != (content.shape, content.dtype):
        return False
    return torch.equal(buffer, content)


def _modules_in(function: Any, args: Any, kwargs: Any) -> list[nn.Module]:
    """Returns the modules that a function gets, each once, in the same order on all workers."""
    given = [args, kwargs]
    while isinstance(function, partial):
        given += [function.args, function.keywords]
        function = function.func
    given += [function, getattr(function, "__self__", None)]
    found = [leaf for leaf in trees.leaves(given) if isinstance(leaf, nn.Module)]
    return list({id(module): module for module in found}.values())
