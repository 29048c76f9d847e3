"""Copies received host memory to devices.

Memory of the warm pool is page-locked when it is copied for the first time, and stays so while the
pool keeps it. That cuts the time of a copy to an eighth. Other memory is copied as it is.

Copies run on a side stream for each device, beside the work of the program. Their end is waited for
on the host, since the host memory returns to its owner afterwards. So a tensor that was copied here
may be used on every stream.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from torchweft.channel.gpu_calls import Mark
from torchweft.channel.memory import BufferPool
from torchweft.channel.page_locks import PageLock, PageLocks

LOCKED_FROM_BYTES = 1 << 20
"""Smaller copies are not worth the page lock."""

SMALL_BYTES = 64 << 10
"""CUDA takes copies of this size from memory that is not page-locked at once, without a wait."""

_SLEEP_FROM_BYTES = 16 << 20
"""Threads sleep, rather than poll, while they wait for copies of this size."""


class Uploads:
    """Copies to devices for one worker. Thread-safe.

    Args:
        pool: The memory that is received into.
        locks: Page-locks the memory, and has the calls of CUDA.
    """

    def __init__(self, pool: BufferPool, locks: PageLocks) -> None:
        self._pool = pool
        self.locks = locks
        self._lock = threading.RLock()

    def to_device(self, memory: memoryview | Tensor, device: torch.device) -> Tensor:
        """Returns the bytes of host memory as a tensor on a device. Blocks until they are there.

        For several tensors of a message, use one ``batch``, which waits once.

        Args:
            memory: Contiguous memory, or a flat tensor of bytes on the CPU.
            device: The device.

        Returns:
            A flat tensor of bytes. The current stream may use it, and free it.
        """
        batch = self.batch()
        tensor = batch.add(memory, device)
        batch.wait()
        return tensor

    def batch(self) -> UploadBatch:
        """Returns a set of copies that are waited for together."""
        return UploadBatch(self)

    def lock_pages(self, host: Tensor, device: torch.device) -> None:
        """Page-locks the slab of a copy's source, if that is useful and possible."""
        if host.numel() < LOCKED_FROM_BYTES:
            return
        slab = self._pool.slab_at(host.data_ptr())
        if slab is None or slab.lock is not None or not self._pool.keeps(slab):
            return
        with self._lock:
            if slab.lock is None:
                lock = self.locks.lock(slab.address, slab.size_bytes, device)
                if isinstance(lock, PageLock):
                    slab.lock = lock


class UploadBatch:
    """Copies to devices that are waited for together. One thread at a time may use it.

    Args:
        uploads: The worker's copies.
    """

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._calls = uploads.locks.calls
        self._sources: list[Tensor] = []
        self._marks: dict[torch.device, Mark] = {}

    def add(self, memory: memoryview | Tensor, device: torch.device) -> Tensor:
        """Enqueues a copy; returns its tensor, which has no content before ``wait`` returns.

        Args:
            memory: Contiguous memory, or a flat tensor of bytes on the CPU; it must not change
                before ``wait`` returns.
            device: The device.
        """
        calls, device = self._calls, self._calls.device_of(device)
        host = _as_tensor(memory)
        if host.numel() <= SMALL_BYTES:
            return calls.upload_small(host, device)
        self._uploads.lock_pages(host, device)
        with calls.on_copy_stream(device):
            tensor = calls.new(host.numel(), device)
            if host.numel():
                # Kept until the end of the copy: the memory would return to its pool.
                self._sources.append(host)
                calls.copy(host, tensor)
                sleeps = host.numel() >= _SLEEP_FROM_BYTES
                self._marks[device] = calls.mark(device, sleeps=sleeps)
        calls.use_on_current_stream(tensor)
        return tensor

    def wait(self) -> None:
        """Blocks until all copies have ended."""
        for mark in self._marks.values():
            mark.synchronize()
        self._marks.clear()
        self._sources.clear()

    def __del__(self) -> None:
        # A batch that failed half-way: its memory must not be reused under a copy.
        if self._marks:
            self.wait()


def _as_tensor(memory: memoryview | Tensor) -> Tensor:
    if isinstance(memory, Tensor):
        return memory
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)
