"""A CUDA driver whose devices are in the host's memory, for processes without a GPU.

Allocations are CPU tensors that a test declares to be on a device. Work of a device is done when
the test says so.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch import Tensor

from torchweft.engine.channels.cuda import HANDLE_BYTES, Driver, DriverError


class Stream:
    """A stream, or an event: busy for as long as the test wants."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._since = 0

    def query(self) -> bool:
        return not self._driver.is_busy

    def record(self, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        self._driver.is_busy = False


class FakeDriver(Driver):
    """Devices in the host's memory. All workers of a process share one."""

    def __init__(self) -> None:
        self.is_busy = False
        self.refuses_to_open = ""
        self.refuses_to_export = self.has_no_events = False
        self.opened: list[int] = []
        self.memory_is_short = False
        self._allocations: dict[int, Tensor] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self.pulls = 0

    def allocate(self, values: Tensor) -> Tensor:
        """Returns values as a tensor on the device."""
        storage = values.contiguous().clone().view(-1).view(torch.uint8)
        self._allocations[next(self._ids)] = storage
        return storage.view(values.dtype).view(values.shape)

    def free(self, tensor: Tensor) -> None:
        del self._allocations[self.buffer_id(tensor.data_ptr())]

    def index_of(self, tensor: Tensor) -> int | None:
        return 0 if self.buffer_id(tensor.data_ptr()) else None

    def is_on_host(self, tensor: Tensor) -> bool:
        return self.index_of(tensor) is None

    def buffer_id(self, address: int) -> int:
        for number, storage in self._allocations.items():
            if storage.data_ptr() <= address < storage.data_ptr() + storage.numel():
                return number
        return 0

    def allocation_at(self, address: int) -> tuple[int, int]:
        storage = self._allocations[self.buffer_id(address)]
        return storage.data_ptr(), storage.numel()

    def export(self, start: int) -> bytes:
        if self.refuses_to_export:
            raise DriverError("not shareable", 1)
        return start.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes, device: int) -> int:
        if self.refuses_to_open:
            raise DriverError(self.refuses_to_open, 999)
        address = int.from_bytes(handle, "little")
        self.opened.append(address)
        return address

    def close(self, address: int, device: int) -> None:
        self.opened.remove(address)

    def view(self, address: int, size_bytes: int) -> Tensor:
        storage = self._allocations[self.buffer_id(address)]
        assert storage.numel() == size_bytes
        return storage

    def stream(self, device: int) -> Any:
        return Stream(self)

    def new_event(self) -> Any:
        if self.has_no_events:
            raise RuntimeError("CUDA error: out of resources")
        return Stream(self)

    def handle_of(self, event: Any) -> bytes:
        return bytes(HANDLE_BYTES)

    def open_event(self, handle: bytes, device: int) -> Any:
        return Stream(self)

    def pull(self, sources: list[Tensor], devices: list[int]) -> list[Tensor]:
        self.pulls += 1
        if self.memory_is_short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [each.clone() for each in sources]
