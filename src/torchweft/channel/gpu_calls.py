"""The calls of CUDA behind copies between host and device memory.

They are collected in one object, so that tests of the logic replace it and need no GPU. Every call
initialises CUDA if the process has not done so. So make none unless a tensor is on a GPU, or has to
be made there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

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
