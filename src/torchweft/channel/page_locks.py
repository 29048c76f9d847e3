"""Page-locked host memory of a worker, within one limit.

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
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
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


class _Owner(weakref.ref[Bytes]):
    """Watches the owner of reserved memory, and knows how much that is."""

    __slots__ = ("size_bytes",)
    size_bytes: int


class PageLocks:
    """Page-locks memory, and counts it. Thread-safe.

    Attributes:
        calls: The calls of CUDA.

    Args:
        limit_bytes: How much memory may be page-locked at a time.
        calls: The calls of CUDA; those of torch by default.
    """

    def __init__(self, limit_bytes: int, calls: GpuCalls | None = None) -> None:
        self.calls = GpuCalls() if calls is None else calls
        self._limit_bytes = limit_bytes
        self._reserved_bytes = 0
        self._freed: deque[int] = deque()
        self._owners: dict[int, _Owner] = {}
        self._ended: deque[Any] = deque()
        self._lock = threading.RLock()

    @property
    def locked_bytes(self) -> int:
        """The page-locked bytes now."""
        with self._lock:
            self._settle()
            return self._reserved_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Counts bytes as locked; returns False, and counts nothing, beyond the limit."""
        with self._lock:
            self._settle()
            if self._reserved_bytes + size_bytes > self._limit_bytes:
                return False
            self._reserved_bytes += size_bytes
            return True

    def free(self, size_bytes: int) -> None:
        """Counts reserved bytes as free again."""
        self._freed.append(size_bytes)  # No lock: a finalizer may call this at any point.

    def free_with(self, owner: Bytes, size_bytes: int) -> None:
        """Counts reserved bytes as free again when an array, and all views of it, are gone."""
        watch = _Owner(owner, self._ended.append)
        watch.size_bytes = size_bytes
        self._owners[id(watch)] = watch

    def _settle(self) -> None:
        while self._ended:
            self._reserved_bytes -= self._owners.pop(id(self._ended.popleft())).size_bytes
        while self._freed:
            self._reserved_bytes -= self._freed.popleft()

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
                f"{self.locked_bytes} are in use"
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
