"""The calls of CUDA, with torch's functions faked: a process without a GPU makes none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchweft.engine.channels import device_copies as gpu_calls
from torchweft.engine.channels.device_copies import GpuCalls


class Runtime:
    """Stands for ``torch.cuda`` and its runtime, with four devices of which the last is in use.

    Attributes:
        log: The calls, with the device that was current.
        code: The result of the next calls.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.code = 0
        self.is_up = True
        self._device = 0
        self._streams = dict.fromkeys(range(4), "default")

    def is_initialized(self) -> bool:
        return self.is_up

    def cudart(self) -> Runtime:
        return self

    def current_device(self) -> int:
        return self._device

    def device_count(self) -> int:
        return 4

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._device = self._device, getattr(device, "index", device)
        yield
        self._device = before

    def current_stream(self, device: torch.device) -> str:
        return self._streams[device.index]

    def set_stream(self, stream: str) -> None:
        self._streams[self._device] = stream

    def Stream(self, device: torch.device) -> str:
        return f"side of {device.index}"

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.log.append(("register", address, size_bytes, flags, self._device))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(("unregister", address))
        if self.code < 0:
            raise RuntimeError("the context is broken")
        return self.code

    def cudaError(self, code: int) -> int:
        return code

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(gpu_calls, "_cuda", made)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda device: device == 3, raising=False
    )
    return made


def test_memory_is_locked_for_all_devices_by_one_that_is_in_use(runtime: Runtime) -> None:
    calls = GpuCalls()
    assert calls.register(64, 10, None) == ""
    assert calls.register(64, 10, torch.device("cuda", 2)) == ""
    assert runtime.log == [("register", 64, 10, 1, 3), ("register", 64, 10, 1, 2)]
    assert runtime.current_device() == 0


def test_a_refused_lock_says_why(runtime: Runtime) -> None:
    runtime.code = 712
    assert GpuCalls().register(64, 10, None) == "error 712 (712)"


@pytest.mark.parametrize("code", [0, 713, -1])
def test_the_end_of_a_lock_never_fails(runtime: Runtime, code: int) -> None:
    runtime.code = code
    GpuCalls().unregister(64)
    assert runtime.log == [("unregister", 64)]
    runtime.is_up = False  # As in a process that was forked.
    GpuCalls().unregister(64)
    assert len(runtime.log) == 1


def test_a_side_stream_is_current_within_its_block_only(runtime: Runtime) -> None:
    calls, device = GpuCalls(), torch.device("cuda", 3)
    with calls.on_copy_stream(device):
        assert runtime.current_stream(device) == "side of 3"
        assert runtime.current_device() == 3
    assert runtime.current_stream(device) == "default"
    assert runtime.current_device() == 0
    with pytest.raises(KeyError), calls.on_copy_stream(device):
        raise KeyError
    assert runtime.current_stream(device) == "default"


def test_a_device_gets_its_index(runtime: Runtime) -> None:
    with runtime.device(2):
        assert GpuCalls().device_of(torch.device("cuda")) == torch.device("cuda", 2)
    assert GpuCalls().device_of(torch.device("cuda", 1)) == torch.device("cuda", 1)
