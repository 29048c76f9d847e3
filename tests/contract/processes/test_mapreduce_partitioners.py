"""Parts and partitioners that travel to real workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.contract.processes.mapreduce_functions_p import cubes, half_of, workers_of
from torchweft import autograd, rpc
from torchweft.launch import Cluster
from torchweft.mapreduce import TensorDimensionPartitioner, batch_partitioner, dim_partitioner

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")

PER_MESSAGE_BYTES = 2000


@pytest.mark.parametrize(
    "partitioner",
    [
        dim_partitioner(0, workers=["worker0", "worker1"]),
        dim_partitioner(1, workers=["worker0", "worker1"]),
        dim_partitioner(0, exclusive=True, keepdim=False, workers=["worker1"]),
        dim_partitioner(1, exclusive=True, workers=["worker0", "worker1"]),
    ],
    ids=repr,
)
def test_a_part_travels_without_the_rest_of_its_tensor(
    group: Cluster, partitioner: TensorDimensionPartitioner
) -> None:
    batch = torch.randn(16, 16, 1024)
    parts = partitioner(batch)
    before = rpc.traffic().bytes_sent
    for worker, args, _ in parts:
        answer = rpc.rpc_sync(worker, half_of, args=args)
        assert torch.equal(answer, half_of(args[0]))
    sent = rpc.traffic().bytes_sent - before
    assert 0 <= sent - batch.nbytes <= len(parts) * PER_MESSAGE_BYTES


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_parts_on_several_workers_are_those_of_the_whole(
    group: Cluster, exclusive: bool, dim: int
) -> None:
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    partitioner = dim_partitioner(
        dim, exclusive=exclusive, keepdim=not exclusive, workers=["worker0", "worker1"]
    )
    with autograd.context() as context_id:
        parts = partitioner(weight.tanh())
        results = [rpc.rpc_async(worker, cubes, args=args) for worker, args, _ in parts]
        loss: Tensor = sum(result.wait() for result in results)  # type: ignore[assignment]
        autograd.backward(context_id, [loss])
        gradient = autograd.get_gradients(context_id)[weight]
    [expected] = torch.autograd.grad(cubes(weight.tanh()), weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-14)


def test_a_partitioner_that_was_sent_cuts_for_the_same_workers(group: Cluster) -> None:
    batch = torch.zeros(6, 2)
    for partitioner in (batch_partitioner, dim_partitioner(1, workers=["worker1", "driver"])):
        there = rpc.rpc_sync("worker0", workers_of, args=(partitioner, batch))
        assert there == workers_of(partitioner, batch)
        assert len(there) > 1
