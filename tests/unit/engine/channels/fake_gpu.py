"""A GPU for tests of the logic of copies: it does nothing before it is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchweft.engine.channels.device_copies import GpuCalls

UNTOUCHED = 0xEE
"""The content of memory that no copy has reached."""


class FakeMark:
    """A mark behind the work that was enqueued before it."""

    def __init__(self, gpu: FakeGpu, count: int) -> None:
        self._gpu = gpu
        self._count = count

    def synchronize(self) -> None:
        self._gpu.waits += 1
        self._gpu.run(self._count)


class FakeGpu(GpuCalls):
    """Stands for CUDA: tensors on the CPU stand for those of the device.

    Attributes:
        waits: How often a thread has waited.
        log: The calls, in order.
        registered: The page-locked ranges, by address.
        obstacle: Why memory cannot be page-locked; empty if it can.
        is_there: Whether the process has a GPU.
    """

    def __init__(self, *, has_pinned: bool = True, obstacle: str = "") -> None:
        super().__init__()
        self.waits = 0
        self.log: list[str] = []
        self.registered: dict[int, int] = {}
        self.obstacle = obstacle
        self.is_there = True
        self._has_pinned = has_pinned
        self._work: list[Callable[[], object] | None] = []
        self._done = 0

    def run(self, count: int) -> None:
        """Does the first ``count`` pieces of work."""
        while self._done < count:
            work, self._work[self._done] = self._work[self._done], None
            assert work is not None
            work()
            self._done += 1

    def is_available(self) -> bool:
        return self.is_there

    def device_of(self, device: torch.device) -> torch.device:
        return device

    def pinned(self, size_bytes: int) -> Tensor:
        if not self._has_pinned:
            raise RuntimeError("CUDA error: out of memory")
        self.log.append(f"pinned {size_bytes}")
        return torch.full((size_bytes,), UNTOUCHED, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.log.append(f"copy {source.numel()}")
        self._work.append(lambda: target.copy_(source))

    def upload_small(self, source: Tensor, device: torch.device) -> Tensor:
        self.log.append(f"upload {source.numel()}")
        return source.clone()

    def mark(self, device: torch.device, *, sleeps: bool = False) -> FakeMark:
        self.log.append("mark, sleeping" if sleeps else "mark")
        return FakeMark(self, len(self._work))

    @contextlib.contextmanager
    def on_copy_stream(self, device: torch.device) -> Iterator[None]:
        self.log.append("side stream")
        yield
        self.log.append("current stream")

    def new(self, size_bytes: int, device: torch.device) -> Tensor:
        self.log.append(f"new {size_bytes}")
        return torch.full((size_bytes,), UNTOUCHED, dtype=torch.uint8)

    def use_on_current_stream(self, tensor: Tensor) -> None:
        self.log.append("use")

    def wait_for_all(self, device: torch.device) -> None:
        self.log.append("wait for all")
        self.run(len(self._work))

    def register(self, address: int, size_bytes: int, device: torch.device | None) -> str:
        if self.obstacle:
            return self.obstacle
        assert address not in self.registered
        self.registered[address] = size_bytes
        return ""

    def unregister(self, address: int) -> None:
        del self.registered[address]
