"""A module under ``DistributedDataParallel`` with NCCL, in contexts, beside a remote table.

NCCL takes one rank on a GPU, so its group has this rank only: the gradients equal those without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.device import DEVICE, IS_GPU
from torchweft import autograd, rpc
from torchweft.launch import Cluster
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

TRAINER, SERVER = "worker0", "worker1"
ROWS, WIDTH = 40, 16
Named = dict[str, Tensor]


def make_table() -> nn.Embedding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Embedding(ROWS, WIDTH)


def make_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1)).to(DEVICE)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(ROWS, (64,), generator=generator).to(DEVICE)


def train(path: str, steps: int, is_replicated: bool, options: dict[str, Any]) -> list[Named]:
    """Trains the net here and the table at the server; returns the gradients of each step."""
    net = make_net()
    if is_replicated:
        distributed.init_process_group(
            "nccl" if IS_GPU else "gloo", init_method=f"file://{path}", rank=0, world_size=1
        )
        devices = [DEVICE] if IS_GPU else None
        net = DistributedDataParallel(net, device_ids=devices, **options)
    try:
        return _trained(net, steps)
    finally:
        del net
        if is_replicated:
            distributed.destroy_process_group()


def _trained(net: nn.Module, steps: int) -> list[Named]:
    table = RemoteModule(f"{SERVER}/{DEVICE}", make_table)
    references = [*table.remote_parameters(), *[rpc.RRef(each) for each in net.parameters()]]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    module = table.get_module_rref()
    found = []
    for step in range(steps):
        with autograd.context() as context_id:
            loss = net(table(batch(step))).square().mean()
            autograd.backward(context_id, [loss])
            mine = autograd.get_gradients(context_id)
            named = {
                name.removeprefix("module."): mine[parameter]
                for name, parameter in net.named_parameters()
            }
            named["table"] = rpc.rpc_sync(SERVER, gradient_of, (context_id, module))
            optimizer.step(context_id)
            found.append({name: gradient.clone() for name, gradient in named.items()})
    return found


def gradient_of(context_id: int, table: rpc.RRef[nn.Embedding]) -> Tensor:
    return autograd.get_gradients(context_id)[table.local_value().weight]


def in_one_process(steps: int) -> list[Named]:
    table, net = make_table().to(DEVICE), make_net()
    optimizer = torch.optim.SGD([*table.parameters(), *net.parameters()], lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        net(table(batch(step))).square().mean().backward()
        named = {**dict(net.named_parameters()), "table": table.weight}
        grads = {name: parameter.grad for name, parameter in named.items()}
        found.append({name: grad.clone() for name, grad in grads.items() if grad is not None})
        optimizer.step()
    return found


def test_gradients_equal_those_without_it(group: Cluster, tmp_path: Path) -> None:
    wanted = in_one_process(3)
    without = rpc.rpc_sync(TRAINER, train, ("", 3, False, {}), timeout=60)
    torch.testing.assert_close(without, wanted, rtol=1e-5, atol=1e-5)
    for number, options in enumerate(({}, {"gradient_as_bucket_view": True})):
        told = (str(tmp_path / str(number)), 3, True, options)
        found = rpc.rpc_sync(TRAINER, train, told, timeout=60)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
