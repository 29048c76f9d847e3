"""Functions that the workers of the GPU tests run, and the tensors that they exchange."""

from __future__ import annotations

import gc
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.gpu.device import DEVICE, IS_GPU, free_bytes, keep_busy, synchronize
from tests.memory_counts import held_counts
from torchweft import rpc
from torchweft.engine.worker.current import current

LIMIT_S = 10.0
BUSY_S = 0.05
"""How long streams are busy before they write values that others must not miss."""

_kept: dict[str, Any] = {}


# Tensors, the same in each process


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns a tensor of random bits, which may be NaN; the same for the same arguments."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{dtype} {shape}".encode()))
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool().to(DEVICE)
    size = (math.prod(shape) * dtype.itemsize,)
    raw = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape).to(DEVICE)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns float32 numbers, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
LARGE_BYTES = 64 << 20

CASES: dict[str, Callable[[], Tensor]] = {
    **{f"{dtype}, inline": lambda dtype=dtype: random_bits(dtype, 3, 5) for dtype in DTYPES},
    **{f"{dtype}, by table": lambda dtype=dtype: random_bits(dtype, 50, 1000) for dtype in DTYPES},
    "empty": lambda: torch.empty(0, 3, device=DEVICE),
    "a number": lambda: torch.tensor(2.5, device=DEVICE),
    "transposed": lambda: numbers(300, 200).t(),
    "strided": lambda: numbers(300, 200)[:, ::3],
    "the end of a storage": lambda: numbers(300, 200)[290:],
    "expanded": lambda: numbers(1, 200).expand(300, 200),
    "conjugated": lambda: random_bits(torch.complex64, 20).conj(),
    "sparse": lambda: torch.sparse_coo_tensor(
        [[0, 2, 2], [1, 0, 3]], [1.5, 2.5, -3.0], (5, 4), device=DEVICE, check_invariants=True
    ),
    "large": lambda: torch.arange(LARGE_BYTES // 4, dtype=torch.int32, device=DEVICE),
    "parameter": lambda: nn.Parameter(numbers(7, 9)),
    "frozen parameter": lambda: nn.Parameter(numbers(7, 9), requires_grad=False),
    "leaf": lambda: numbers(7, 9).requires_grad_(),
    "odd size": lambda: random_bits(torch.uint8, 1_000_003),
}


def made(name: str) -> Tensor:
    """Returns the tensor of a case."""
    return CASES[name]()


def all_made() -> dict[str, Tensor]:
    return {name: made(name) for name in CASES}


async def made_soon(name: str) -> Tensor:
    return made(name)


def many(count: int) -> list[Tensor]:
    """Returns tensors of many sizes, from no bytes to 200 KiB."""
    return [numbers((number * number) % 50_000, seed=number) for number in range(count)]


def differences(name: str, actual: Tensor) -> list[str]:
    """Returns how a tensor that was received differs from that of its case."""
    return compared(name, actual, made(name))


def compared(name: str, actual: Any, wanted: Tensor) -> list[str]:
    """Returns how one tensor differs from another, bit by bit."""
    if not isinstance(actual, Tensor):
        return [f"{name}: it is {actual!r}"]
    found = [
        f"{name}: {what} is {is_so}, not {should_be}"
        for what, is_so, should_be in (
            ("the class", type(actual), type(wanted)),
            ("the dtype", actual.dtype, wanted.dtype),
            ("the shape", actual.shape, wanted.shape),
            ("the device", actual.device, wanted.device),
            ("the layout", actual.layout, wanted.layout),
            ("requires_grad", actual.requires_grad, wanted.requires_grad),
        )
        if is_so != should_be
    ]
    if found:
        return found
    if wanted.is_sparse:
        parts = [each.detach().coalesce() for each in (actual, wanted)]
        indices, values = (
            compared(f"{name}, its {what}", *[getattr(part, what)() for part in parts])
            for what in ("indices", "values")
        )
        return indices + values
    if not torch.equal(_bits(actual), _bits(wanted)):
        return [f"{name}: the numbers differ"]
    return []


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def many_differences(actual: list[Tensor]) -> list[str]:
    pairs = enumerate(zip(actual, many(len(actual)), strict=True))
    return [text for number, pair in pairs for text in compared(f"tensor {number}", *pair)]


@dataclass
class Batch:
    inputs: Tensor
    labels: Tensor
    name: str


def batch() -> Batch:
    return Batch(numbers(64, 100), torch.arange(64, device=DEVICE), "first")


def batch_differences(actual: Batch) -> list[str]:
    wanted = batch()
    assert actual.name == wanted.name
    return [
        *compared("inputs", actual.inputs, wanted.inputs),
        *compared("labels", actual.labels, wanted.labels),
    ]


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50)).to(DEVICE)


def state_differences(actual: dict[str, Tensor]) -> list[str]:
    wanted = module().state_dict()
    assert actual.keys() == wanted.keys()
    return [text for name in wanted for text in compared(name, actual[name], wanted[name])]


def module_differences(actual: nn.Module) -> list[str]:
    return state_differences(actual.state_dict())


# Calls


def echo(value: Any) -> Any:
    return value


def added(first: Tensor, second: Any) -> Tensor:
    return first + second


def bounds(tensor: Tensor | rpc.RRef[Tensor]) -> list[float]:
    """Returns the least and the greatest number of a tensor, read on the current stream."""
    if not isinstance(tensor, Tensor):
        tensor = tensor.local_value() if tensor.is_owner() else tensor.to_here()
    return [float(each) for each in torch.aminmax(tensor)]


def bounds_through(to: str, function: Callable[..., Any], *args: Any) -> list[float]:
    """Returns the bounds of the result of a call to a third worker."""
    return bounds(rpc.rpc_sync(to, function, args))


async def bounds_awaited(to: str, function: Callable[..., Any], *args: Any) -> list[float]:
    return bounds(await rpc.rpc_async(to, function, args))


def fetched_differences(name: str, reference: rpc.RRef[Tensor]) -> list[str]:
    return differences(name, reference.to_here())


def differences_at(to: str) -> list[str]:
    """Returns how the tensors of all cases differ that go to a worker, and that come from it."""
    found = []
    with torch.no_grad():
        for name in CASES:
            found += rpc.rpc_sync(to, differences, (name, made(name)))
            found += differences(name, rpc.rpc_sync(to, made, (name,)))
    return found


async def awaited_differences(name: str, to: str) -> list[str]:
    return differences(name, await rpc.rpc_async(to, made, (name,)))


def remote_on(to: str, function: Callable[..., Any], *args: Any) -> rpc.RRef[Any]:
    """Has a third worker make a value, and returns the reference."""
    return rpc.remote(to, function, args)


def keep(name: str, value: Any) -> None:
    _kept[name] = value


def keep_more(value: Any) -> None:
    _kept[f"value {len(_kept)}"] = value


def kept(name: str) -> Any:
    return _kept[name]


def forget() -> None:
    _kept.clear()


def kept_bounds(name: str) -> list[float]:
    return bounds(_kept[name])


def fill_kept(name: str, value: float) -> None:
    _kept[name].fill_(value)
    synchronize()


def filled(tensor: Tensor, value: float) -> list[float]:
    return bounds(tensor.fill_(value))


def changed_together(whole: Tensor, row: Tensor) -> list[float]:
    """Returns the bounds of a tensor after a change of another, which should be a view of it."""
    row.fill_(-7)
    return bounds(whole)


def slices_late(count: int) -> Iterator[Tensor]:
    """Generates tensors whose numbers are written after the stream's work."""
    for number in range(count):
        yield late(float(number + 1), 1 << 16, BUSY_S / 5)


# Order


def late(value: float, count: int, busy_s: float = BUSY_S) -> Tensor:
    """Returns a tensor whose numbers a busy stream writes after this function has returned."""
    tensor = torch.zeros(count, device=DEVICE)
    keep_busy(busy_s)
    return tensor.fill_(value)


def late_kept(name: str, value: float, count: int, busy_s: float = BUSY_S) -> None:
    _kept[name] = late(value, count, busy_s)


class State:
    """Numbers that calls change in place, one after the other."""

    def __init__(self, count: int) -> None:
        self.numbers = torch.zeros(count, device=DEVICE)

    def add(self, amount: float) -> None:
        keep_busy(BUSY_S / 10)
        self.numbers.add_(amount)

    def double(self) -> Tensor:
        keep_busy(BUSY_S / 10)
        return self.numbers.mul_(2)

    def read(self) -> list[float]:
        return bounds(self.numbers)


def stream_here() -> int:
    """Returns the handle of the stream on which this function runs."""
    return int(torch.cuda.current_stream(DEVICE).cuda_stream)


def default_stream_here() -> int:
    return int(torch.cuda.default_stream(DEVICE).cuda_stream)


_meeting = threading.Barrier(2)


def stream_of_two() -> int:
    """Returns the handle of its stream when two calls run at the same time."""
    _meeting.wait(LIMIT_S)
    handle = stream_here()
    _meeting.wait(LIMIT_S)
    return handle


# Failures


def device_works() -> list[float]:
    """Returns bounds of numbers that this worker computes on its device."""
    ones = torch.ones(64, 64, device=DEVICE)
    return bounds(ones @ ones)


class Failure(NamedTuple):
    """The error of a call that should fail.

    Attributes:
        types: The names of its class and of all its bases; empty if the call succeeded.
        text: Its message.
        at_s: The time when it came, by the monotonic clock of the host.
    """

    types: list[str]
    text: str
    at_s: float


def failure_of(to: str, function: Callable[..., Any], *args: Any) -> Failure:
    """Makes a call that should fail."""
    try:
        rpc.rpc_sync(to, function, args)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return Failure(kinds, str(error), time.monotonic())
    return Failure([], "the call succeeded", time.monotonic())


def failure_with(
    to: str, function: Callable[..., Any], make: Callable[..., Any], *args: Any
) -> Failure:
    """Makes a call that should fail, with a value that is made here."""
    return failure_of(to, function, make(*args))


def call(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


def call_with(to: str, function: Callable[..., Any], make: Callable[..., Any], *args: Any) -> Any:
    """Calls a function with a value that is made here."""
    return rpc.rpc_sync(to, function, (make(*args),))


def call_with_late(to: str, value: float, count: int, busy_s: float) -> None:
    """Makes a call whose argument a busy stream writes later."""
    rpc.rpc_sync(to, keep, ("argument", late(value, count, busy_s)))


_begun = threading.Event()


def late_noted(value: float, count: int, busy_s: float) -> Tensor:
    tensor = late(value, count, busy_s)
    _begun.set()
    return tensor


def await_begun() -> bool:
    return _begun.wait(LIMIT_S)


def limit_memory(size_bytes: int) -> None:
    """Makes this process run out of device memory beyond a size."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(size_bytes / total, DEVICE)


def zeros(size_bytes: int) -> Tensor:
    return torch.zeros(size_bytes // 4, device=DEVICE)


def device_of(tensor: Tensor) -> str:
    return str(tensor.device)


def is_cuda_initialised() -> bool:
    return torch.cuda.is_initialized()


# Memory


def free_bytes_here() -> int:
    gc.collect()
    return free_bytes()


def statistics(peer: str) -> dict[str, float]:
    """Returns the device memory and the tensors that this process holds."""
    gc.collect()
    held = held_counts(current().find(peer).held)
    synchronize()
    return {
        "allocated bytes": torch.cuda.memory_allocated(DEVICE) if IS_GPU else 0,
        "held messages": held.message_count,
        "held bytes": held.size_bytes,
        "tensors": sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
    }


SIZES = [4 << 10, 64 << 10, 8 << 10, 1 << 20, 16 << 10, 256 << 10, 4 << 10, 4 << 20]
"""Bytes of the tensors of calls that follow one another."""


def call_often(to: str, count: int) -> None:
    """Makes calls with an argument and a result of mixed sizes, and drops both."""
    sent = {size: torch.ones(size // 4, device=DEVICE) for size in SIZES}
    for number in range(count):
        size = SIZES[number % len(SIZES)]
        result = rpc.rpc_sync(to, added, (sent[size], number))
        assert result.shape == (size // 4,)
    assert float(result[-1]) == number + 1
