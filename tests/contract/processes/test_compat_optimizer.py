"""The local optimizers of ``torchweft.compat.optimizer``, run as programs run PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import torchweft
from torchweft import rpc
from torchweft.autograd import backward, context
from torchweft.compat.optimizer import (
    _local_optimizer_step,
    _LocalOptimizer,
    _new_local_optimizer,
    _wait_for_all,
)
from torchweft.launch import Nursery

# Each test shares the workers of the file; they connect to one another when they first talk.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
WORKERS = ("worker0", "worker1")


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=len(WORKERS), nursery=nursery):
        yield


def make_parameter(value: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value]))


def times(parameter: rpc.RRef[Tensor], value: Tensor) -> Tensor:
    return parameter.local_value() * value


def describe(optimizer: rpc.RRef[_LocalOptimizer], parameter: rpc.RRef[Tensor]) -> tuple[str, bool]:
    return type(optimizer.local_value().optim).__name__, parameter.local_value().grad is None


def test_one_on_each_worker_steps_with_the_gradients_of_a_context() -> None:
    parameters = [rpc.remote(name, make_parameter, (3.0,)) for name in WORKERS]
    made = [
        rpc.rpc_async(each.owner(), _new_local_optimizer, (torch.optim.SGD, [each]), {"lr": 0.5})
        for each in parameters
    ]
    optimizers = _wait_for_all(made)
    with context() as context_id:
        value = torch.ones(1)
        for parameter in parameters:
            value = rpc.rpc_sync(parameter.owner(), times, (parameter, value))
        backward(context_id, [value.sum()])
        steps = [
            rpc.rpc_async(each.owner(), _local_optimizer_step, (each, context_id))
            for each in optimizers
        ]
        assert _wait_for_all(steps) == [None, None]
    assert [each.to_here().item() for each in parameters] == [1.5, 1.5]
    for optimizer, parameter in zip(optimizers, parameters, strict=True):
        assert rpc.rpc_sync(parameter.owner(), describe, (optimizer, parameter)) == ("SGD", True)
