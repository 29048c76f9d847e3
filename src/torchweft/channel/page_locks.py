"""Page-locked host memory of a worker, within one limit.

A GPU copies to and from page-locked (pinned) memory at the speed of its bus, and past the CPU:
several times faster than other memory. But the system cannot move such memory, so its amount is
limited, by ``WEFT_PINNED_LIMIT_BYTES``. Beyond the limit memory is used as it is, and copies are
slower.

A lock must end before its memory is unmapped. So its holder keeps it beside the memory, or the lock
itself keeps the memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchweft.channel.gpu_calls import GpuCalls

Bytes = npt.NDArray[np.uint8]


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
