"""What the parts of a map have in common, on a worker that runs some of them.

The caller packs it once. A worker keeps it as it came, and unpacks it anew for each part, with
clones of the tensors: what a part does to its copy, no other one sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.agent.current import current
from weft.agent.served_calls import current_call
from weft.autograd.contexts import current_id
from weft.errors import ArgumentTypeError
from weft.mapreduce import trees
from weft.rpc.calls import rpc_async
from weft.rpc.handles import RRef
from weft.rpc.outcomes import WhenReady
from weft.rpc.own_tensors import own_copy
from weft.rpc.serving import owned
from weft.rpc.worker import Worker
from weft.serialize.objects import unpack

Address = tuple[int, int, int]
"""The number of a reference, for a caller that keeps the reference meanwhile."""


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
        is_own: Whether this worker has packed it, and may trust it.
    """

    __slots__ = ("_is_own", "payload", "tensors")

    def __init__(self, payload: bytes, tensors: Sequence[Tensor], *, is_own: bool) -> None:
        self.payload = payload
        self.tensors = tensors
        self._is_own = is_own

    def call(self, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
        """Calls the function, with a copy of the values in their slots.

        Returns:
            The function, and what it returned.
        """
        read: Callable[..., Any] = unpack if self._is_own else _worker().reader.unpack
        function, values = read(self.payload, _copies(self.tensors), ())
        if _is_served_to_itself():
            args, kwargs = _own_arguments(args, kwargs)
        args, kwargs = _filled((args, kwargs), values)
        return function, function(*args, **kwargs)


# What the caller of a map, and workers among themselves, ask for by name.


def make(payload: bytes, tensors: Sequence[Tensor]) -> Shared:
    """Returns an object of what the caller of a map has packed."""
    return Shared(payload, tensors, is_own=_is_served_to_itself())


async def pull(parent: RRef[Shared]) -> Shared:
    """Returns an object like that of another worker; no thread waits for it meanwhile."""
    address = tuple(parent.id)
    held: Any = await rpc_async(parent.owner(), content, (address,), timeout=0.0)
    payload, tensors = held
    return Shared(payload, tensors, is_own=False)


def content(address: Address) -> WhenReady:
    """Returns what an object of this worker holds."""
    return WhenReady(
        owned(address), lambda value: (content, (_checked(value).payload, value.tensors))
    )


def run(address: Address, args: Any, kwargs: Any) -> WhenReady:
    """Runs a part of a map, with what is in an object of this worker."""
    return WhenReady(owned(address), lambda value: _checked(value).call(args, kwargs))


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
    worker = _worker()
    if worker.copies_own:
        return args, kwargs
    packed = worker.pack_for([worker.agent.me], (args, kwargs))
    copies: Any = unpack(packed.payload, _copies(packed.tensors), packed.externals)
    args, kwargs = copies
    return args, kwargs


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    context_id = current_id()
    return [own_copy(each, context_id) for each in tensors]


def _is_served_to_itself() -> bool:
    served = current_call.get()
    return served is not None and served.peer.is_self


def _worker() -> Worker:
    return current().part(Worker)
