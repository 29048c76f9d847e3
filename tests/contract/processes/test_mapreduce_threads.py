"""Threads of one process run maps at the same time, each in an autograd context of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from tests.contract.processes import mapreduce_functions_m as parts
from torchweft import mapreduce
from torchweft.launch import Cluster
from torchweft.mapreduce import autograd

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")
LIMIT_S = 30.0
ROUNDS = 6


class Squares(nn.Module):
    """Has gradients that are whole numbers, so that sums are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(12.0, dtype=torch.float64).view(3, 4))
        self.second = nn.Parameter(torch.arange(2000.0, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([(inputs @ self.first).flatten(), self.second * inputs.sum()])


def sum_of_squares(model: nn.Module, inputs: Tensor) -> Tensor:
    result: Tensor = model(inputs).square().sum()
    return result


def rows_of(thread: int) -> Tensor:
    return torch.arange(12.0, dtype=torch.float64).view(4, 3) + thread


def single(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    total = sum(sum_of_squares(model, row) for row in inputs.split(1))
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, list(model.parameters())))


@pytest.mark.parametrize("only_inputs", [False, True])
def test_gradients_of_all_threads_add_up(group: Cluster, only_inputs: bool) -> None:
    model, threads = Squares(), 3
    parameters = list(model.parameters())
    expected = [single(model, rows_of(thread)) for thread in range(threads)]
    together = threading.Barrier(threads)

    def train(thread: int) -> None:
        for _ in range(ROUNDS):
            together.wait(LIMIT_S)
            with autograd.context() as context_id:
                total = mapreduce.remote_sync_call(
                    sum_of_squares,
                    args=(model, rows_of(thread)),
                    partitioner=mapreduce.dim_partitioner(0, exclusive=True, keepdim=True),
                    reducer=mapreduce.sum_reducer,
                    timeout=LIMIT_S,
                )
                inputs = parameters if only_inputs else None
                autograd.backward(context_id, total, inputs=inputs)
                together.wait(LIMIT_S)  # All threads have added to .grad.
                own = autograd.get_gradients(context_id)
                for parameter, gradient in zip(parameters, expected[thread], strict=True):
                    assert torch.equal(own[parameter], gradient)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(train, thread) for thread in range(threads)]:
            future.result(LIMIT_S)
    for place, parameter in enumerate(parameters):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, sum(each[place] for each in expected) * ROUNDS)


def test_threads_take_no_results_of_each_other(group: Cluster) -> None:
    def double_all(thread: int) -> list[float]:
        found = mapreduce.remote_sync_call(
            parts.double, args=(torch.arange(10.0) + thread,), timeout=LIMIT_S
        )
        return torch.cat(found).tolist()

    with ThreadPoolExecutor(4) as pool:
        for thread, found in enumerate(pool.map(double_all, range(20), timeout=LIMIT_S)):
            assert found == [2.0 * (each + thread) for each in range(10)]
