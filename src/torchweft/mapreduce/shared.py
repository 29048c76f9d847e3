"""What the parts of a map have in common, on a worker that runs some of them.

The caller packs it once. A worker keeps it as it came, and unpacks it anew for each part, with
clones of the tensors: what a part does to its copy, no other one sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchweft.agent.served_calls import current_call
from torchweft.autograd.contexts import current_id
from torchweft.errors import ArgumentTypeError, CallCancelled
from torchweft.mapreduce import trees
from torchweft.mapreduce.turns import Place, Turns
from torchweft.rpc.calls import start
from torchweft.rpc.current_call import is_cancelled
from torchweft.rpc.outcomes import WhenReady
from torchweft.rpc.own_tensors import own_copy
from torchweft.rpc.rref import RRef
from torchweft.rpc.serving import NO_ARGUMENTS, owned
from torchweft.rpc.strictness import check_called, check_types
from torchweft.rpc.worker import current_worker
from torchweft.serialize.objects import unpack
from torchweft.serialize.registry import rebuilds_plain, remotely_callable

_LOOK_S = 0.5
"""How often a part that waits for its turn looks whether somebody still wants it."""

Address = tuple[int, int, int]
"""The number of a reference, for a caller that keeps the reference meanwhile."""


@rebuilds_plain
class Slot:
    """Stands in the arguments of a part for something that parts have in common.

    Args:
        number: Its place among what they have in common.
    """

    __slots__ = ("number",)
    __match_args__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[type[Slot], tuple[int]]:
        return Slot, (self.number,)


class Shared:
    """A function and values, packed.

    Args:
        payload: The packed pair of the function and the list of values.
        tensors: What was taken out of it.
        concurrency: How many parts may run at a time; others wait for their turn.
        is_own: Whether this worker has packed it, and may trust it.
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
        """Calls the function, with a copy of the values in their slots, when its turn has come.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            number: Counts the parts that were sent here.
            after: The number of the part before which this one must not run; or ``NOTHING``.

        Returns:
            The function, and what it returned.
        """
        read: Callable[..., Any] = unpack if self._is_own else current_worker().reader.unpack
        function, values = read(self.payload, _copies(self.tensors), ())
        check_called(function)
        check_types(values=(values, list))
        if _is_served_to_itself():
            args, kwargs = _own_arguments(args, kwargs)
        args, kwargs = _filled((args, kwargs), values)
        if isinstance(args, Tensor):
            raise ArgumentTypeError(NO_ARGUMENTS)
        with self._turn(number, after):
            return function, function(*args, **kwargs)

    @contextlib.contextmanager
    def _turn(self, number: int, after: int) -> Iterator[None]:
        """Waits until it is the turn of a part that was sent ahead of those that run."""
        place = self._turns.take(number, after)
        if place is not None:
            self._wait(place)
        try:
            yield
        finally:
            self._turns.give_back()

    def _wait(self, place: Place) -> None:
        reactor = current_worker().agent.reactor
        is_counted = reactor.begin_wait()
        try:
            has_turn = self._turns.wait(place, _LOOK_S, is_cancelled)
        finally:
            if is_counted:
                reactor.end_wait()
        if not has_turn:
            raise CallCancelled("the caller of the map does not want this part any more")


# What the caller of a map, and workers among themselves, ask for by name.


@remotely_callable
def make(payload: bytes, tensors: Sequence[Tensor], concurrency: int) -> Shared:
    """Returns an object of what the caller of a map has packed."""
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
    """Returns an object like that of another worker; no thread waits for it meanwhile."""
    check_types(parent=(parent, RRef))
    address = tuple(parent.id)
    # Found by its id: the name may be another's by now, or nobody's.
    owner = parent.agent().peers[parent.id.owner]
    held: Any = await start(current_worker(), owner, content, (address,), {}, 0.0)
    payload, tensors, concurrency = held
    return _made(payload, tensors, concurrency, is_own=False)


@remotely_callable
def content(address: Address) -> WhenReady:
    """Returns what an object of this worker holds."""

    def parts_of(value: Any) -> tuple[Callable[..., Any], Any]:
        shared = _checked(value)
        return content, (shared.payload, shared.tensors, shared.concurrency)

    return WhenReady(owned(address), parts_of)


@remotely_callable
def run(address: Address, args: Any, kwargs: Any, number: int, after: int) -> WhenReady:
    """Runs a part of a map, with what is in an object of this worker."""
    check_types(number=(number, int), after=(after, int))
    return WhenReady(
        owned(address), lambda value: _checked(value).call(args, kwargs, number, after)
    )


def _checked(value: Any) -> Shared:
    # Others name what they ask for by a number, and must not get at anything else that way.
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
    """Returns copies of arguments that a worker has sent itself: tensors go by reference then."""
    worker = current_worker()
    if worker.copies_own:
        return args, kwargs
    packed = worker.pack_for([worker.agent.me], (args, kwargs))
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
