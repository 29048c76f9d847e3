"""Entries become JSON and named tensors, and come back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.tables import cases
from tests.unit.checkpoint.encoded import encoded
from tests.unit.engine.channels.fake_gpu import FakeGpu
from torchweft.checkpoint.encoding import Encoder, decode_part
from torchweft.checkpoint.kinds import MODULE, is_plain, state_of
from torchweft.engine.channels.device_copies import PageLocks
from torchweft.errors import ArgumentTypeError
from torchweft.memory import DeviceCopies


def returned(value: Any) -> Any:
    """Returns a value that was encoded as JSON, and decoded."""
    part = encoded({"x": {"kind": "value", "state": value}})
    head = json.loads(json.dumps(part.head))
    return decode_part(head, ["x"], part.tensors.__getitem__)["x"]["state"]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (threading.Lock(), "x is a _thread.lock"),
        ({"a": [1, object()]}, r"x\['a'\]\[1\] is a builtins.object"),
        ({(1, object()): 1}, "x, a key,"),
        (np.ones(2), "x is a numpy.ndarray"),
        (type("Subclass", (dict,), {})(), "Subclass"),
    ],
    ids=["lock", "inside", "key", "array", "subclass"],
)
def test_anything_else_is_refused_with_its_place(value: Any, place: str) -> None:
    assert not is_plain(value)
    with pytest.raises(ArgumentTypeError, match=place):
        returned(value)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (np.datetime64("2020-01-01"), r"x is a datetime\.date"),
        (np.longdouble(1), r"x is a numpy\.longdouble"),
    ],
    ids=["date", "long double"],
)
def test_plain_values_that_could_not_be_read_are_refused(value: Any, place: str) -> None:
    with pytest.raises(ArgumentTypeError, match=place):
        returned(value)


@cases(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.tensor(3),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float8_e5m2),
        torch.ones((2, 3), dtype=torch.complex128),
        torch.empty(0, 3, dtype=torch.complex64),
        torch.tensor(2j),
        torch.tensor([7], dtype=torch.uint16),
        torch.arange(3).expand(2, 3)[:1, 2:],
        torch.ones(1).expand(0, 1),
        torch.ones(3, 1).expand(3, 4),
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_tensors_of_any_form_come_back(tensor: Tensor) -> None:
    found = returned(tensor)
    assert found.dtype is tensor.dtype
    assert found.layout is tensor.layout
    assert torch.equal(found.to_dense().reshape(-1), tensor.to_dense().reshape(-1))
    if tensor.layout is torch.strided and 0 not in tensor.stride() and tensor.numel() > 1:
        assert found.stride() == tensor.stride()


@cases(
    ("make", "text"),
    [
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "quantized tensor.*int_repr",
        ),
        (lambda: torch.eye(2).to_sparse_csr(), "tensor of layout torch.sparse_csr"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_forms_that_no_file_has_are_refused(
    make: Callable[[], Tensor], text: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^x is a {text}"):
        returned(make())


# Tensors on GPUs, with tensors on the CPU in their place

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
    encoder = Encoder(devices)
    encoder.add(MODULE, {"m": state_of(MODULE, module)})
    devices.wait()
    taken = encoder.finish().content()["m"]["state"]["state"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(torch.equal(taken[name], before[name]) for name in before)
    assert taken["0.weight"] is taken["1.weight"]
    assert sum(entry.startswith("copy") for entry in gpu.log) == 3
