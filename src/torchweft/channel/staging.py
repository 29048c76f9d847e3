"""Copies a message's device memory to the host, for channels that carry host memory.

All copies of a message are enqueued before any is waited for, and only their end is waited for. A
copy to pinned memory runs beside the CPU, at about twice the speed of a copy to other memory. The
pinned memory is that of torch's cache, so it is made once. Small tensors of a message share one
piece of it.

A large buffer can be sent while it is copied. Its copy is cut into parts, and ``HostCopies.parts``
returns each part when it is on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchweft.channel.gpu_calls import Mark
from torchweft.channel.page_locks import PageLocks

SMALL_BYTES = 64 << 10
"""Buffers up to this size share one piece of pinned memory."""

CUT_FROM_BYTES = 8 << 20
PART_BYTES = 4 << 20

_ALIGNMENT = 64
_SLEEP_FROM_BYTES = 8 << 20
"""Threads sleep, rather than poll, while they wait for copies of this size."""


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

    def part(self, start: int, end: int) -> _Target:
        """Returns a range of it."""
        return _Target(self.tensor[start:end], self.memory[start:end], self.is_pinned)


class Part(NamedTuple):
    """A range of a buffer in host memory: ``number`` is that of the buffer in its message."""

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

    def parts(self, numbers: Collection[int]) -> Iterator[Part]:
        """Yields the parts of some buffers, each as soon as it is on the host; blocks between.

        Args:
            numbers: The numbers of the buffers in their message.
        """
        for part, mark in self._parts:
            if part.number in numbers:
                if mark is not None:
                    mark.synchronize()
                yield part


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
        targets = self._targets([source.numel() for source in sources])
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

    def _targets(self, sizes: Sequence[int]) -> list[_Target]:
        """Returns host memory for each size."""
        small = self._memory_for(sum(_padded(size) for size in sizes if size <= SMALL_BYTES))
        targets, position = [], 0
        for size in sizes:
            if size <= SMALL_BYTES:
                targets.append(small.part(position, position + size))
                position += _padded(size)
            else:
                targets.append(self._memory_for(size))
        return targets

    def _memory_for(self, size_bytes: int) -> _Target:
        pinned = self._pinned(size_bytes) if size_bytes else None
        tensor = (
            torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            if pinned is None
            else pinned[0]
        )
        memory = tensor.numpy().data if pinned is None else pinned[1].data
        return _Target(tensor, memory, pinned is not None)

    def _pinned(self, size_bytes: int) -> tuple[Tensor, npt.NDArray[np.uint8]] | None:
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


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(buffer: Tensor) -> Tensor:
    """Returns a flat buffer as bytes, without a copy."""
    buffer = buffer.detach()
    if not buffer.numel():
        return buffer.new_empty(0, dtype=torch.uint8)
    if buffer.stride(-1) != 1:  # a single element, cut out of a larger tensor
        buffer = buffer.as_strided((1,), (1,))
    return buffer.view(torch.uint8)
