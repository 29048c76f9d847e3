"""A GPU of vector clocks: tells which work is ordered after which, without a GPU."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from torchweft.engine.threads import device_streams

Clock = dict[int, int]
"""How much work of each stream comes before, by the number of the stream."""


class FakeStream:
    """A stream: ``clock`` is the work that its next operation comes after."""

    def __init__(self, number: int, device: int) -> None:
        self.number = number
        self.device = device
        self.clock: Clock = {}

    def __repr__(self) -> str:
        return f"stream {self.number} of GPU {self.device}"


class FakeEvent:
    """An event: the clock of its latest record."""

    def __init__(self) -> None:
        self.clock: Clock = {}


class FakeTensor:
    """A value on a GPU: the operation that made it, and the streams that are known to use it."""

    def __init__(self, stream: FakeStream) -> None:
        self.device = stream.device
        self.stream = stream
        self.at = stream.clock[stream.number]
        self.kept_for: set[int] = {stream.number}

    def __reduce__(self) -> Any:
        # PyTorch's futures cannot order it, so they must not take it as one that they can.
        raise TypeError("a fake tensor stays in its process")


class FakeCuda:
    """``Cuda`` with streams that only count. Thread-safe.

    Args:
        devices: The GPUs that have a context.
    """

    def __init__(self, devices: Sequence[int] = (0,)) -> None:
        self._devices = list(devices)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._default: dict[int, FakeStream] = {}
        self._local = threading.local()
        self.is_on = True
        self.made: list[FakeStream] = []
        self.events = 0
        self.synchronized = 0
        self.fails = False

    def is_initialized(self) -> bool:
        return self.is_on

    def devices(self) -> Sequence[int]:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return tuple(self._devices)

    def add_context(self, device: int) -> None:
        """Does what the first work on a device does."""
        if device not in self._devices:
            self._devices.append(device)

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device: int) -> None:
        self._local.device = device

    def _current(self) -> dict[int, FakeStream]:
        found: dict[int, FakeStream] | None = getattr(self._local, "streams", None)
        if found is None:
            found = self._local.streams = {}
        return found

    def current_stream(self, device: int) -> FakeStream:
        return self._current().get(device) or self.default_stream(device)

    def default_stream(self, device: int) -> FakeStream:
        with self._lock:
            if device not in self._default:
                self._default[device] = FakeStream(next(self._numbers), device)
            return self._default[device]

    def new_stream(self, device: int) -> FakeStream:
        with self._lock:
            self.made.append(FakeStream(next(self._numbers), device))
            return self.made[-1]

    def set_stream(self, stream: FakeStream) -> None:
        self._current()[stream.device] = stream
        self._local.device = stream.device  # as PyTorch does

    def record(self, stream: FakeStream, event: FakeEvent | None = None) -> FakeEvent:
        with self._lock:
            if event is None:
                self.events += 1
                event = FakeEvent()
            event.clock = dict(stream.clock)
            return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            for number, count in event.clock.items():
                stream.clock[number] = max(stream.clock.get(number, 0), count)

    def synchronize(self, stream: FakeStream) -> None:
        self.synchronized += 1

    def keep(self, tensor: Any, stream: FakeStream) -> None:
        if isinstance(tensor, FakeTensor):
            tensor.kept_for.add(stream.number)

    # Work of programs

    def compute(self, device: int = 0) -> FakeTensor:
        """Runs an operation on this thread's current stream; returns its result."""
        stream = self.current_stream(device)
        with self._lock:
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            return FakeTensor(stream)

    def is_ordered(self, value: FakeTensor) -> bool:
        """Whether work of this thread's current stream comes after the making of a value."""
        with self._lock:
            clock = self.current_stream(value.device).clock
            return clock.get(value.stream.number, 0) >= value.at


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch, devices: Sequence[int] = (0,)) -> Iterator[FakeCuda]:
    """Has Weft use a fake GPU within a ``with`` block."""
    fake = FakeCuda(devices)
    with patch.context() as patched:
        patched.setattr(device_streams, "HAS_CUDA", True)
        patched.setattr(device_streams, "cuda", fake)
        patched.setattr(device_streams, "_is_on_device", lambda value: type(value) is FakeTensor)
        patched.setattr(device_streams, "_number_of", lambda tensor: tensor.device)
        patched.setattr(device_streams, "_has_reported", False)
        # PyTorch's futures are real, and there is no GPU for them.
        patched.setattr("torchweft.rpc.calls.native_devices", lambda numbers: [])
        yield fake
