"""Modules under FSDP are refused in passes of Weft; a pass that stops before them works."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.contract.processes.ddp_functions import seeded
from torchweft import rpc
from torchweft.autograd import backward, context, get_gradients
from torchweft.errors import AutogradError
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

TRAINERS = ("worker0", "worker1")


def make_net() -> nn.Module:
    net: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), 1)
    return net


def batch_of(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 12, dtype=torch.float64).view(3, 4)


def double(inputs: Tensor) -> Tensor:
    return 2 * inputs


def train(rank: int, path: str) -> tuple[str, list[Tensor], Tensor]:
    """Returns the error of a pass through the module, and the gradients of one that avoids it."""
    from torch.distributed.fsdp import fully_shard  # takes more than a second

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=len(TRAINERS),
        timeout=datetime.timedelta(seconds=30),
    )
    net = make_net()
    mesh = distributed.device_mesh.init_device_mesh("cpu", (len(TRAINERS),))
    fully_shard(net, mesh=mesh)
    inputs = batch_of(rank).requires_grad_()
    with context() as context_id, pytest.raises(AutogradError) as caught:
        backward(context_id, [net(rpc.rpc_sync("worker2", double, (inputs,))).square().mean()])
    with context() as context_id:
        received = rpc.rpc_sync("worker2", double, (inputs,))
        leaf = received.detach().requires_grad_()
        net(leaf).square().mean().backward()
        backward(context_id, [received], grad_tensors=[leaf.grad])
        of_inputs = get_gradients(context_id)[inputs]
    gradients = [parameter.grad.full_tensor() for parameter in net.parameters()]  # type: ignore[union-attr, operator]
    distributed.destroy_process_group()
    return str(caught.value), gradients, of_inputs


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="gloo cannot reduce and scatter")
def test_a_pass_through_fsdp_is_refused_and_the_way_that_the_error_names_works(
    nursery: Nursery, tmp_path: Path
) -> None:
    with cluster(workers=3, nursery=nursery):
        calls = [
            rpc.rpc_async(trainer, train, (rank, str(tmp_path / "store")))
            for rank, trainer in enumerate(TRAINERS)
        ]
        results = [call.wait() for call in calls]
    net = make_net()
    inputs = [batch_of(rank).requires_grad_() for rank in range(len(TRAINERS))]
    losses = [net(double(each)).square().mean() for each in inputs]
    torch.stack(losses).mean().backward()
    for (error, gradients, of_inputs), each in zip(results, inputs, strict=True):
        assert "the FSDPSequential under FullyShardedDataParallel" in error
        for gradient, parameter in zip(gradients, net.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)
        assert each.grad is not None
        torch.testing.assert_close(of_inputs, 2 * each.grad, rtol=1e-12, atol=1e-12)
