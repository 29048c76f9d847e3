"""Lazy modules on workers: their parameters have no shape before the first forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from torchweft import checkpoint
from torchweft.autograd import backward, context
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
FIRST, SECOND = "worker0", "worker1"
INPUTS = torch.arange(12.0).view(3, 4) / 12


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=2, nursery=nursery):
        yield


def make(width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(width), nn.Tanh(), nn.LazyLinear(1))


def loss_of(model: Any) -> Tensor:
    loss: Tensor = (model(INPUTS) - 1).pow(2).mean()
    return loss


def trained(model: RemoteModule, optimizer: DistributedOptimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        with context() as context_id:
            loss = loss_of(model)
            backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def shapes_in(state: dict[str, Any]) -> list[Any]:
    return [parameter["shape"] for parameter in state["parameters"]]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_made_before_the_first_forward_pass_trains(optimizer_class: Any) -> None:
    model = make()
    local = optimizer_class(model.parameters(), lr=0.1)
    expected = []
    for _ in range(4):
        local.zero_grad()
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        local.step()
        expected.append(loss.item())
    remote = RemoteModule(FIRST, make)
    optimizer = DistributedOptimizer(optimizer_class, remote.remote_parameters(), lr=0.1)
    assert trained(remote, optimizer, 4) == expected


def test_its_state_has_the_shapes_as_soon_as_they_are_known() -> None:
    remote = RemoteModule(FIRST, make)
    optimizer = DistributedOptimizer(torch.optim.Adam, remote.remote_parameters(), lr=0.1)
    early = optimizer.state_dict()
    assert shapes_in(early) == [None] * 4
    trained(remote, optimizer, 1)
    state = optimizer.state_dict()
    assert shapes_in(state) == [(5, 4), (5,), (1, 5), (1,)]

    other = RemoteModule(SECOND, make)
    other.load_state_dict(remote.state_dict())
    again = DistributedOptimizer(torch.optim.Adam, other.remote_parameters(), lr=0.1)
    again.load_state_dict(early)  # It fits: nothing in it has a shape.
    again.load_state_dict(state)
    assert trained(other, again, 2) == trained(remote, optimizer, 2)

    wider = RemoteModule(SECOND, make, args=(6,))
    third = DistributedOptimizer(torch.optim.Adam, wider.remote_parameters(), lr=0.1)
    loss_of(wider)
    with pytest.raises(ConfigurationError, match=r"shape \(5, 4\) for parameter 0"):
        third.load_state_dict(state)


def test_a_snapshot_of_an_optimizer_waits_for_the_first_forward_pass(tmp_path: Path) -> None:
    model = RemoteModule(FIRST, make)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.remote_parameters(), lr=0.1)
    with pytest.raises(ArgumentTypeError, match="optimizer steps a parameter of a lazy module"):
        checkpoint.save(tmp_path, {"optimizer": optimizer}, step=0)
    trained(model, optimizer, 1)
    checkpoint.save(tmp_path, {"optimizer": optimizer}, step=1)
    optimizer.param_groups[0]["lr"] = 0.5
    checkpoint.restore(tmp_path, {"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.1
