"""State on GPUs, with tensors on the CPU in the place of those on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.channels.fake_gpu import FakeGpu
from torchweft.checkpoint import kinds
from torchweft.checkpoint.device_copies import DeviceCopies
from torchweft.checkpoint.kinds import DATA, MODULE
from torchweft.engine.channels.device_copies import PageLocks

MIB = 1 << 20


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def devices(gpu: FakeGpu) -> DeviceCopies:
    return DeviceCopies(PageLocks(64 * MIB, gpu))


@pytest.fixture
def _all_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 100, 100)[:, ::2, 1],
        torch.tensor(3.0),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        torch.ones(5, dtype=torch.bfloat16),
    ],
)
def test_a_copy_is_equal_to_its_tensor(devices: DeviceCopies, tensor: Tensor) -> None:
    copy = devices.copy(tensor)
    devices.wait()
    assert copy.dtype is tensor.dtype
    assert torch.equal(copy, tensor)
    assert copy.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_the_device_is_waited_for_once_before_the_copies_and_once_after(
    gpu: FakeGpu, devices: DeviceCopies
) -> None:
    copies = [devices.copy(torch.ones(10)) for _ in range(3)]
    assert gpu.log.count("wait for all") == 1
    assert gpu.log[0] == "wait for all"
    assert gpu.waits == 0
    devices.wait()
    assert all(copy.tolist() == [1.0] * 10 for copy in copies)
    devices.copy(torch.ones(1))
    assert gpu.log.count("wait for all") == 2, "later copies follow later work"


@pytest.mark.usefixtures("_all_on_a_gpu")
def test_a_module_on_a_gpu_is_copied_at_its_state_and_ties_stay(
    gpu: FakeGpu, devices: DeviceCopies
) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    taken = kinds.take("m", MODULE, module, devices)["state"]
    devices.wait()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(torch.equal(taken[name], before[name]) for name in before)
    assert taken["0.weight"] is taken["1.weight"]
    assert sum(entry.startswith("copy") for entry in gpu.log) == 3


def test_tensors_of_data_go_to_the_devices_of_those_that_they_replace() -> None:
    present: dict[str, Any] = {
        "a": torch.ones(2, device="meta"),
        "b": [torch.ones(1), torch.ones(1, device="meta")],
        "c": ({"d": torch.ones(1, device="meta")}, 3),
        "gone": torch.ones(1),
    }
    saved = {
        "a": torch.zeros(2),
        "b": [torch.zeros(1), torch.zeros(1), torch.zeros(1)],
        "c": ({"d": torch.zeros(1)}, 4),
        "new": torch.zeros(1),
    }
    kept = present
    kinds.put(DATA, present, saved, strict=True)
    assert present is kept
    assert list(present) == ["a", "b", "c", "new"]
    assert present["a"].device.type == "meta"
    assert [tensor.device.type for tensor in present["b"]] == ["cpu", "meta", "cpu"]
    assert present["c"][0]["d"].device.type == "meta"
    assert present["c"][1] == 4
    assert present["new"].device.type == "cpu"


def test_a_list_that_was_longer_is_refilled() -> None:
    present = [torch.ones(1, device="meta"), torch.ones(1), 3]
    kinds.refill(present, [torch.zeros(1)])
    assert [tensor.device.type for tensor in present] == ["meta"]


class Generators:
    """Stands for the generators of two GPUs, of which this process uses the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self.states = [torch.full((16,), number, dtype=torch.uint8) for number in range(count)]
        for name, value in {
            "is_initialized": lambda: True,
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_rng_state": self.states.__getitem__,
            "set_rng_state": lambda state, device: self.states.__setitem__(device, state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C, "_cuda_hasPrimaryContext", lambda device: device == 1, raising=False
        )


def test_generators_of_gpus_in_use_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(monkeypatch)
    states = kinds.take_random()
    assert states["cuda"][0] is None
    assert states["cuda"][1][0] == 1
    generators.states[:] = [torch.zeros(16, dtype=torch.uint8)] * 2
    kinds.put_random(states)
    assert [int(state[0]) for state in generators.states] == [0, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_states_of_gpus_that_are_not_there_are_left_out(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with monkeypatch.context() as two:
        Generators(two)
        states = kinds.take_random()
    generators = Generators(monkeypatch, count)
    kinds.put_random(states)
    assert [int(state[0]) for state in generators.states] == list(range(count))
