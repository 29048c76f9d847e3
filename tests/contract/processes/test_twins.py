"""Workers with different twins of the hot path, native and plain, in one group."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweft
from tests.contract.processes.functions import add, identity
from torchweft import autograd, rpc
from torchweft.launch import Cluster, Nursery


@pytest.fixture(scope="module", params=["0", "auto"])
def mixed(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A worker with the plain twin, or the same one as this process has."""
    environment = {**os.environ, "WEFT_NATIVE": request.param}
    with (
        Nursery(environment=environment) as nursery,
        torchweft.cluster(workers=1, nursery=nursery) as group,
    ):
        rpc.rpc_sync("worker0", identity, args=(torch.ones(2),))  # Connects.
        yield group


VALUES: tuple[Any, ...] = (
    None,
    (1, 2.5, "text", b"bytes", True, 1 << 100, 1j),
    {"lr": 0.1, "betas": [0.9, 0.99], "names": {"a", "b"}},
    OrderedDict(first=1, second=(2, [3])),
    (torch.float64, torch.device("cpu"), torch.Size([2, 3])),
    [{"number": index} for index in range(30)],
)
TENSORS = (
    torch.arange(6.0),
    torch.arange(6).view(2, 3).t(),
    torch.arange(64.0).view(8, 8)[:, ::2],
    torch.ones(3, 1).expand(3, 4),
    torch.tensor(5, dtype=torch.int16),
    torch.empty(0, 4),
    torch.ones(4, dtype=torch.bfloat16),
    torch.ones(2, dtype=torch.complex64),
    torch.tensor([True, False]),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back(mixed: Cluster, value: Any) -> None:
    arrived = rpc.rpc_sync("worker0", identity, args=(value,))
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: str(tuple(tensor.shape)))
def test_tensors_come_back(mixed: Cluster, tensor: torch.Tensor) -> None:
    arrived, listed = rpc.rpc_sync("worker0", identity, args=((tensor, [tensor + 0]),))
    assert arrived.dtype == tensor.dtype
    assert arrived.stride() == tensor.stride()
    assert torch.equal(arrived, tensor)
    assert torch.equal(listed[0], tensor)


def test_views_of_one_tensor_stay_views_of_one_tensor(mixed: Cluster) -> None:
    base = torch.arange(16.0)
    first, second = rpc.rpc_sync("worker0", identity, args=((base[:8], base[4:]),))
    first[4] = -1.0
    assert second[0] == -1.0


def test_a_model_and_its_state_come_back(mixed: Cluster) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = rpc.rpc_sync("worker0", identity, args=(model.state_dict(),))
    assert state._metadata == model.state_dict()._metadata
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor)


def test_gradients_are_those_of_one_process(mixed: Cluster) -> None:
    left, right = (torch.arange(1.0, 4.0, requires_grad=True) for _ in range(2))
    with autograd.context() as context_id:
        loss = (rpc.rpc_sync("worker0", add, args=(left, right)) ** 3).sum()
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)
    expected = 3 * (2 * left.detach()) ** 2
    assert torch.allclose(gradients[left], expected)
    assert torch.allclose(gradients[right], expected)


def test_a_program_error_keeps_its_type(mixed: Cluster) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        rpc.rpc_sync("worker0", add, args=(1, "text"))
