"""Copies a message's device memory to the host and back, for channels that carry host memory.

To the host (``Staging``), all copies of a message are enqueued before any is waited for, and only
their end is waited for. A copy to pinned memory runs beside the CPU, at about twice the speed of a
copy to other memory. The pinned memory is that of torch's cache, so it is made once.

A large buffer can be sent while it is copied. Its copy is cut into parts, and ``HostCopies.parts``
returns each part when it is on the host.

To a device (``Uploads``), memory of the warm pool is page-locked when it is copied for the first
time, and stays so while the pool keeps it. That cuts the time of a copy to an eighth. Other memory
is copied as it is. Copies run on a side stream for each device, beside the work of the program.
Their end is waited for on the host, since the host memory returns to its owner afterwards. So a
tensor that was copied here may be used on every stream.

A GPU copies to and from page-locked (pinned) memory at the speed of its bus, and past the CPU:
several times faster than other memory. But the system cannot move such memory, so its amount is
limited, by ``WEFT_PINNED_LIMIT_BYTES``. Beyond the limit memory is used as it is, and copies are
slower.

A lock must end before its memory is unmapped. So its holder keeps it beside the memory, or the lock
itself keeps the memory.

``GpuCalls`` are the calls of CUDA behind page locks and copies, in one object, so that tests of the
logic replace it and need no GPU. Every call initialises CUDA if the process has not done so. So
make none unless a tensor is on a GPU, or has to be made there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchweft.engine.channels.memory import Budget, BufferPool, Bytes, address_of

SMALL_BYTES = 64 << 10
"""CUDA takes copies to a device of this size at once, from memory that is not page-locked."""
LOCKED_FROM_BYTES = 1 << 20
"""Smaller copies to a device are not worth the page lock."""

CUT_FROM_BYTES = 8 << 20
PART_BYTES = 4 << 20

_SLEEP_FROM_BYTES, _UPLOAD_SLEEPS_FROM_BYTES = 8 << 20, 16 << 20
"""Threads sleep, rather than poll, while they wait for copies of this size."""

_cuda: Any = torch.cuda  # Versions of torch differ in the types that it declares.

_PORTABLE = 1
"""The flag of ``cudaHostRegister`` for memory that is pinned for all devices."""


class Mark(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Blocks until the work before it is done."""


class GpuCalls:
    """Makes the calls. Thread-safe."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.RLock()

    def is_available(self) -> bool:
        """Whether this process has a GPU."""
        return bool(_cuda.is_available())

    def device_of(self, device: torch.device) -> torch.device:
        """Returns a device with its index."""
        if device.index is None:
            return torch.device(device.type, _cuda.current_device())
        return device

    def pinned(self, size_bytes: int) -> Tensor:
        """Returns a flat tensor of bytes in pinned memory of torch's cache.

        Raises:
            RuntimeError: There is no such memory.
        """
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueues a copy on the current stream of the device of either tensor."""
        target.copy_(source, non_blocking=True)

    def upload_small(self, source: Tensor, device: torch.device) -> Tensor:
        """Returns a copy of up to 64 KiB on a device, ordered on the current stream.

        The source, which is not page-locked, may be changed afterwards: CUDA has taken it.
        """
        return source.to(device, non_blocking=True)

    def mark(self, device: torch.device, *, sleeps: bool = False) -> Mark:
        """Returns a mark behind all work of the current stream.

        Args:
            device: The device of the stream.
            sleeps: Whether a thread that waits sleeps, rather than polls.
        """
        event = _cuda.Event(blocking=sleeps)
        event.record(_cuda.current_stream(device))
        mark: Mark = event
        return mark

    @contextlib.contextmanager
    def on_copy_stream(self, device: torch.device) -> Iterator[None]:
        """Makes a side stream for copies current within a ``with`` block, and its device."""
        # Not torch.cuda.stream: at its end it makes a context on the thread's device, which may be
        # a device that the process does not use.
        with _cuda.device(device):
            before = _cuda.current_stream(device)
            _cuda.set_stream(self._copy_stream(device))
            try:
                yield
            finally:
                _cuda.set_stream(before)

    def new(self, size_bytes: int, device: torch.device) -> Tensor:
        """Returns a flat tensor of bytes on a device, allocated on the current stream."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def use_on_current_stream(self, tensor: Tensor) -> None:
        """Tells the allocator that the current stream uses a tensor of another stream."""
        tensor.record_stream(_cuda.current_stream(tensor.device))

    def wait_for_all(self, device: torch.device) -> None:
        """Blocks until all work that this process has given a device is done."""
        _cuda.synchronize(device)

    def register(self, address: int, size_bytes: int, device: torch.device | None) -> str:
        """Page-locks host memory; returns why that is not possible, empty if it is done.

        Args:
            address: Where the memory begins.
            size_bytes: Its size.
            device: The device whose context makes the call; by default the current one, or another
                that is in use where the current one is not.
        """
        runtime = _cuda.cudart()
        with _cuda.device(_device_in_use() if device is None else device):
            code = int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE))
            if not code:
                return ""
            _forget_error()
        return f"{runtime.cudaGetErrorString(runtime.cudaError(code))} ({code})"

    def unregister(self, address: int) -> None:
        """Ends the page lock of memory that ``register`` was called with; never fails."""
        # A process that was forked has the memory as well, but neither CUDA nor the lock.
        if not _cuda.is_initialized():
            return
        with contextlib.suppress(Exception):
            runtime = _cuda.cudart()
            if int(runtime.cudaHostUnregister(address)):
                _forget_error()

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = _cuda.Stream(device)
            return self._streams[device]


def _device_in_use() -> int:
    """Returns the current device, or another that has a context if the current one has none."""
    current = int(_cuda.current_device())
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True)
    for device in (current, *range(_cuda.device_count())):
        if has_context(device):
            return int(device)
    return current


def _forget_error() -> None:
    """Clears CUDA's note of the last error of this thread.

    Otherwise torch's check after its next kernel would raise that error. torch offers no such call.
    But it loads the library in a way that lets its symbols be found.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).cudaGetLastError()


class PageLocks(Budget):
    """Page-locks memory, and counts it. Thread-safe.

    Attributes:
        calls: The calls of CUDA.

    Args:
        limit_bytes: How much memory may be page-locked at a time.
        calls: The calls of CUDA; those of torch by default.
    """

    def __init__(self, limit_bytes: int, calls: GpuCalls | None = None) -> None:
        super().__init__(limit_bytes)
        self.calls = GpuCalls() if calls is None else calls

    def lock(
        self,
        address: int,
        size_bytes: int,
        device: torch.device | None = None,
        *,
        keep: object = None,
    ) -> PageLock | str:
        """Page-locks memory of this process; returns why that is not possible if it is not.

        Args:
            address: Where the memory begins.
            size_bytes: Its size.
            device: A device that is in use, whose context makes the call; by default one that is
                in use, or else the current one.
            keep: An object that owns the memory, which the lock keeps until it is released.
        """
        if not self.reserve(size_bytes):
            return (
                f"{size_bytes} bytes exceed the limit of page-locked memory: "
                f"{self._limit_bytes} bytes are allowed (WEFT_PINNED_LIMIT_BYTES), of which "
                f"{self.reserved_bytes} are in use"
            )
        try:
            obstacle = self.calls.register(address, size_bytes, device)
        except BaseException:
            self.free(size_bytes)
            raise
        if obstacle:
            self.free(size_bytes)
            return obstacle
        return PageLock(self, address, size_bytes, keep)


class PageLock:
    """Keeps a range of memory page-locked until it is released, or freed itself."""

    __slots__ = ("_address", "_keep", "_locks", "_size_bytes")

    def __init__(self, locks: PageLocks, address: int, size_bytes: int, keep: object) -> None:
        self._keep = keep
        self._locks: PageLocks | None = locks
        self._address = address
        self._size_bytes = size_bytes

    def release(self) -> None:
        """Ends the lock; does nothing the second time."""
        locks, self._locks = self._locks, None
        if locks is not None:
            locks.calls.unregister(self._address)
            locks.free(self._size_bytes)
            self._keep = None

    def __del__(self) -> None:
        self.release()


# Copies


class _Target(NamedTuple):
    """Host memory for one buffer.

    Attributes:
        tensor: The memory for torch. It is on torch's own block, which is not reused before the
            copies to it have ended, not even if their result is dropped.
        memory: The memory for others.
        is_pinned: Whether it is pinned.
    """

    tensor: Tensor
    memory: memoryview
    is_pinned: bool


class Part(NamedTuple):
    """A range of a buffer in host memory: ``number`` is that of the buffer among others."""

    number: int
    start: int
    end: int


class HostCopies:
    """Copies of device buffers in host memory, which may still be under way.

    Attributes:
        memories: The memory of each buffer, in order. Its contents are undefined until ``wait``
            returns, or ``parts`` yields the range.
    """

    def __init__(
        self, memories: list[memoryview], parts: Sequence[tuple[Part, Mark | None]]
    ) -> None:
        self.memories = memories
        self._parts = parts

    def wait(self) -> list[memoryview]:
        """Blocks until all copies are complete; returns the memories."""
        for mark in dict.fromkeys(mark for _, mark in self._parts):
            if mark is not None:
                mark.synchronize()
        return self.memories

    def parts(self, buffers: Sequence[memoryview]) -> Iterator[Part]:
        """Yields the ranges of buffers, each as soon as its bytes are there; blocks between.

        Args:
            buffers: Some of ``memories``, and other memory of the host, which has its bytes.
        """
        numbers = {address_of(each): n for n, each in enumerate(self.memories) if each.nbytes}
        positions: dict[int, int] = {}
        for position, buffer in enumerate(buffers):
            number = numbers.get(address_of(buffer))
            if number is None:
                yield Part(position, 0, buffer.nbytes)
            else:
                positions[number] = position
        for part, mark in self._parts:
            if part.number in positions:
                if mark is not None:
                    mark.synchronize()
                yield part._replace(number=positions[part.number])


class Staging:
    """Copies device memory to the host for one worker. Thread-safe.

    Args:
        locks: Counts the pinned memory, and has the calls of CUDA.
    """

    def __init__(self, locks: PageLocks) -> None:
        self._locks = locks
        self._calls = locks.calls

    def to_host(self, buffers: Sequence[Tensor]) -> list[memoryview]:
        """Returns the bytes of device tensors in host memory. Blocks until they are there.

        The copies follow all work that the caller has enqueued on its current streams.

        Args:
            buffers: Flat contiguous tensors, on any devices.
        """
        return self.begin(buffers).wait()

    def begin(self, buffers: Sequence[Tensor], *, cut: bool = False) -> HostCopies:
        """Enqueues copies of device tensors, on the current streams of their devices.

        The tensors may be changed by later work on the same streams, and freed at once.

        Args:
            buffers: Flat contiguous tensors, on any devices.
            cut: Whether large buffers are copied in parts that can be used one by one.
        """
        sources = [_as_bytes(buffer) for buffer in buffers]
        targets = [self._memory_for(source.numel()) for source in sources]
        parts: list[tuple[Part, Mark | None]] = []
        open_parts: dict[torch.device, list[Part]] = {}
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            size_bytes = source.numel()
            whole = Part(number, 0, size_bytes)
            if not size_bytes:
                continue
            if not target.is_pinned:
                target.tensor.copy_(source)
                parts.append((whole, None))
            elif cut and size_bytes >= CUT_FROM_BYTES:
                parts += self._copy_in_parts(number, source, target.tensor)
            else:
                self._calls.copy(source, target.tensor)
                open_parts.setdefault(source.device, []).append(whole)
        for device, copied in open_parts.items():
            size_bytes = sum(part.end for part in copied)
            mark = self._calls.mark(device, sleeps=size_bytes >= _SLEEP_FROM_BYTES)
            parts += [(part, mark) for part in copied]
        return HostCopies([target.memory for target in targets], parts)

    def _copy_in_parts(
        self, number: int, source: Tensor, target: Tensor
    ) -> Iterator[tuple[Part, Mark]]:
        for start in range(0, source.numel(), PART_BYTES):
            end = min(start + PART_BYTES, source.numel())
            self._calls.copy(source[start:end], target[start:end])
            yield Part(number, start, end), self._calls.mark(source.device, sleeps=True)

    def _memory_for(self, size_bytes: int) -> _Target:
        pinned = self._pinned(size_bytes) if size_bytes else None
        tensor = (
            torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            if pinned is None
            else pinned[0]
        )
        memory = tensor.numpy().data if pinned is None else pinned[1].data
        return _Target(tensor, memory, pinned is not None)

    def _pinned(self, size_bytes: int) -> tuple[Tensor, Bytes] | None:
        """Returns pinned memory, with its exporter; None if there is none."""
        taken_bytes = 1 << (size_bytes - 1).bit_length()  # torch rounds its blocks so
        if not self._locks.reserve(taken_bytes):
            return None
        try:
            tensor = self._calls.pinned(size_bytes)
        except BaseException as error:
            self._locks.free(taken_bytes)
            if isinstance(error, RuntimeError):
                return None
            raise
        # Every view of the memory keeps the exporter alive, which keeps torch's block.
        exporter = tensor.numpy()
        self._locks.free_with(exporter, taken_bytes)
        return tensor, exporter


def _as_bytes(buffer: Tensor) -> Tensor:
    """Returns a flat buffer as bytes, without a copy."""
    buffer = buffer.detach()
    if not buffer.numel():
        return buffer.new_empty(0, dtype=torch.uint8)
    if buffer.stride(-1) != 1:  # a single element, cut out of a larger tensor
        buffer = buffer.as_strided((1,), (1,))
    return buffer.view(torch.uint8)


class Uploads:
    """Copies to devices for one worker. Thread-safe.

    Args:
        pool: The memory that is received into.
        locks: Page-locks the memory, and has the calls of CUDA.
    """

    def __init__(self, pool: BufferPool, locks: PageLocks) -> None:
        self._pool = pool
        self._locks = locks
        self._lock = threading.RLock()

    def to_devices(
        self, memories: Sequence[memoryview], devices: Sequence[torch.device]
    ) -> list[Tensor]:
        """Copies contiguous memory of the host, each to the device given; see ``copy_to_devices``.

        Args:
            memories: The sources, which must not change meanwhile.
            devices: Their devices.
        """
        sources = [as_tensor(memory) for memory in memories]
        for source, device in zip(sources, devices, strict=True):
            if source.numel() >= LOCKED_FROM_BYTES:
                self._lock_pages(source.data_ptr(), device)
        return copy_to_devices(self._locks.calls, sources, devices)

    def _lock_pages(self, address: int, device: torch.device) -> None:
        """Page-locks the slab of a copy's source, if that is useful and possible."""
        slab = self._pool.slab_at(address)
        if slab is None or PageLock in slab.attached or not self._pool.keeps(slab):
            return
        with self._lock:
            if PageLock not in slab.attached:
                lock = self._locks.lock(slab.address, slab.size_bytes, device)
                if isinstance(lock, PageLock):
                    slab.attached[PageLock] = lock


def copy_to_devices(
    calls: GpuCalls, sources: Sequence[Tensor], devices: Sequence[torch.device]
) -> list[Tensor]:
    """Copies tensors of bytes to new memory, each on the device given. Blocks until that is done.

    The copies run on side streams: they do not wait for earlier work of this thread. The new memory
    is for the current streams of this thread.

    Args:
        calls: Makes the calls of CUDA.
        sources: Flat tensors of bytes, on the host or on a device.
        devices: The devices of the copies.

    Raises:
        torch.OutOfMemoryError: A device has too little memory.
    """
    copies: list[Tensor] = []
    marks: dict[torch.device, Mark] = {}
    try:
        for source, wanted in zip(sources, devices, strict=True):
            size_bytes, is_on_host, device = source.numel(), source.is_cpu, calls.device_of(wanted)
            if is_on_host and size_bytes <= SMALL_BYTES:
                copies.append(calls.upload_small(source, device))
                continue
            with calls.on_copy_stream(device):
                copy = calls.new(size_bytes, device)
                calls.copy(source, copy)
                sleeps = is_on_host and size_bytes >= _UPLOAD_SLEEPS_FROM_BYTES
                marks[device] = calls.mark(device, sleeps=sleeps)
            calls.use_on_current_stream(copy)
            copies.append(copy)
    finally:
        # Also after a failure: the sources must not be in use once this function has ended.
        for mark in marks.values():
            mark.synchronize()
    return copies


def as_tensor(memory: memoryview) -> Tensor:
    """Returns host memory as a flat tensor of bytes, which shares it unless it is read-only."""
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)
