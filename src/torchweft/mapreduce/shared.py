"""The values that parts of a map share, on a worker that runs some of the parts.

The caller packs the values once. A worker keeps them packed, and unpacks them anew for each part,
with clones of the tensors: no part sees another part's changes to its copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchweft.autograd.contexts import current_id
from torchweft.engine.codec.functions import describe
from torchweft.engine.codec.objects import unpack
from torchweft.engine.codec.registry import rebuilds_plain, remotely_callable
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.tensor_messages import own_copy
from torchweft.errors import ArgumentTypeError, CallCancelled
from torchweft.mapreduce import trees
from torchweft.mapreduce.buffers import original
from torchweft.mapreduce.turns import Place, Turns
from torchweft.rpc.calls import start
from torchweft.rpc.current_call import check_called, check_types, is_cancelled
from torchweft.rpc.rref import RRef
from torchweft.rpc.serving import WhenReady, owned
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
        place = self._turns.take(number, after)
        if place is not None:
            self._wait(place)
        try:
            yield
        finally:
            self._turns.give_back()

    def _wait(self, place: Place) -> None:
        with current_worker().agent.reactor.waiting():
            has_turn = self._turns.wait(place, _LOOK_S, is_cancelled)
        if not has_turn:
            raise CallCancelled("the caller of the map does not want this part any more")


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
