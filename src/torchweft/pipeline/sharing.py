"""Results that are computed into shared memory, so that they are sent without a copy.

An operation of torch usually allocates the memory of its result. Many operations can also write
into memory that they are given. ``Redirection`` watches one run to see which operation makes a
value that is sent later; in further runs it gives this operation memory that the workers of the
host share. What the watched run has found is checked again in each run. So a run that takes
another way, or operations that need memory of their own, only lead to a copy when the value is
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchweft.memory import shared_empty
from torchweft.pipeline.values import Packet

SMALLEST_BYTES = 128 << 10
"""Smaller values travel in their message, or are copied in no time."""
_OPERATION_US = 6.0
"""What an operation of a redirected run costs more; measured."""
_COPY_US_PER_MIB = 100.0
"""What the copy costs; measured."""
_PLANS_LIMIT = 16
_PLAIN = (Tensor, nn.Parameter)

Allocate = Callable[[Sequence[int], torch.dtype], Tensor | None]


class _Target(NamedTuple):
    """An operation that writes into shared memory.

    Attributes:
        function: The operation.
        into: Its form that is given the memory of its result.
        signature: Shapes, types and other arguments that it must have.
        shape: The shape of the result.
        dtype: The type of the result.
    """

    function: Any
    into: Any
    signature: Any
    shape: torch.Size
    dtype: torch.dtype


_Plan = dict[int, _Target]
"""By its place in the run, each operation that writes into shared memory."""


def allocate_shared(shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """Returns a tensor in this worker's shared memory, or None if there is no more of it."""
    try:
        return shared_empty(*shape, dtype=dtype)
    except MemoryError:
        return None


class Redirection:
    """Has the results of a repeated computation written into shared memory. For one thread.

    Args:
        allocate: Returns memory for a result, or None if there is none.
    """

    def __init__(self, allocate: Allocate = allocate_shared) -> None:
        self._allocate = allocate
        self._plans: dict[Any, _Plan] = {}
        self._watching: _Watching | None = None
        self._key: Any = None
        self._written: list[int] = []  # addresses, of the last run

    def run(self, given: Iterable[Any]) -> AbstractContextManager[object]:
        """Returns the context in which the computation is to run once.

        Args:
            given: What it computes with; another plan is made for tensors of other shapes.
        """
        self._watching, self._written = None, []
        self._key = tuple([_signature(each) for each in given])
        plan = self._plans.get(self._key)
        if plan is None:
            if len(self._plans) == _PLANS_LIMIT:
                return nullcontext()
            self._watching = _Watching()
            return self._watching
        return _Writing(plan, self._allocate, self._written) if plan else nullcontext()

    def learn(self, results: Iterable[Tensor | None]) -> None:
        """Makes a plan after a run that was watched; does nothing after others.

        Args:
            results: The values of the run that are sent.
        """
        watching, self._watching = self._watching, None
        if watching is None:
            return
        plan: _Plan = {}
        n_bytes = 0
        for result in results:
            made = None if result is None else watching.maker_of(result)
            if made is not None:
                place, target = made
                n_bytes += target.shape.numel() * target.dtype.itemsize
                plan[place] = target
        saved_us = n_bytes / (1 << 20) * _COPY_US_PER_MIB
        self._plans[self._key] = plan if saved_us > watching.count * _OPERATION_US else {}

    def own(self, packet: Packet) -> Packet:
        """Returns a packet in which values that need no gradient are not in the shared memory.

        Torch lets a stage change such inputs in place.
        """
        mask, structure, leaves = packet
        written = self._written
        if not written or mask + 1 == 1 << len(leaves):
            return packet
        owned = [
            leaf.clone()
            if not mask >> place & 1 and isinstance(leaf, Tensor) and _address(leaf) in written
            else leaf
            for place, leaf in enumerate(leaves)
        ]
        return Packet(mask, structure, owned)


class _Watching(TorchDispatchMode):
    """Notes which operation has made each storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._made: dict[int, tuple[int, _Target]] = {}

    def maker_of(self, result: Tensor) -> tuple[int, _Target] | None:
        """Returns the operation that has made a tensor, and its place; None if it cannot share."""
        if not _is_plain(result):
            return None
        storage = result.untyped_storage()
        made = self._made.get(storage.data_ptr())
        # A part of a larger result is copied, as it would keep all of it.
        is_whole = result.is_contiguous() and result.nbytes == storage.nbytes()
        return made if is_whole and result.nbytes >= SMALLEST_BYTES else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation, and notes its result."""
        kwargs = kwargs or {}
        place, self.count = self.count, self.count + 1
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and _is_plain(result):
            address = _address(result)
            if address not in _addresses((args, kwargs)):
                self._made.pop(address, None)
                into = _into(func) if result.is_contiguous() else None
                if into is not None:
                    signature = _signature((args, kwargs))
                    target = _Target(func, into, signature, result.shape, result.dtype)
                    self._made[address] = place, target
        return result


class _Writing(TorchDispatchMode):
    """Gives the operations of a plan memory for their results."""

    def __init__(self, plan: _Plan, allocate: Allocate, written: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plan = plan
        self._allocate = allocate
        self._written = written
        self._place = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation."""
        kwargs = kwargs or {}
        place, self._place = self._place, self._place + 1
        target = self._plan.get(place)
        if target is None or func is not target.function:
            return func(*args, **kwargs)
        memory = None
        if _signature((args, kwargs)) == target.signature:
            memory = self._allocate(target.shape, target.dtype)
        if memory is None:
            return func(*args, **kwargs)
        self._written.append(memory.data_ptr())
        return target.into(*args, **kwargs, out=memory)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0


def _addresses(value: Any) -> set[int]:
    """Returns the addresses of the storages of tensors in arguments."""
    if isinstance(value, Tensor):
        return {_address(value)}
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return set()
    return set().union(*map(_addresses, value))


def _signature(value: Any) -> Any:
    """Returns that of which shape and type of a result depend; numbers of a computation do not."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, dict):
        return tuple([(name, _signature(each)) for name, each in value.items()])
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    return value if isinstance(value, (int, str, torch.dtype)) else type(value)


def _into(function: Any) -> Any:
    """Returns the form of an operation that writes into memory that it is given, or None.

    Only forms that the CPU implements are returned. The others compute as usual and copy.
    """
    if function is torch.ops.aten.relu.default:  # computed as clamp_min, which has such a form
        return _relu_into
    if torch.Tag.dynamic_output_shape in function.tags:
        return None
    packet = function.overloadpacket
    wanted = _arguments(function)
    for name in packet.overloads():
        form = getattr(packet, name)
        *given, last = _arguments(form) or [("", "")]
        if given == wanted and last == ("out", "Tensor"):
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(form.name(), "CPU")
            return form if has_kernel else None
    return None


def _relu_into(values: Tensor, *, out: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.clamp_min.out(values, 0, out=out)
    return result


def _arguments(function: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in function._schema.arguments]
