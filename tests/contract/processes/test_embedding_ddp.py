"""Tables on a server under a dense part that ``DistributedDataParallel`` replicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.contract.processes.ddp_functions import join_all
from torchweft import autograd, rpc
from torchweft.embedding import SGD, Copies, TableConfig, Tables, plan_tables
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS = ["worker0", "worker1"]
STEPS = 5
TABLES = [
    TableConfig("sparse", 20, 4, "mean", torch.float64),
    TableConfig("dense", 6, 4, "sum", torch.float64),
]
PLAN = plan_tables(TABLES, ["worker2"], trainers=2, places={"dense": Copies()})


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with cluster(workers=3, nursery=nursery):
        join_all(TRAINERS, tmp_path_factory.mktemp("gloo"))
        yield


class Model(nn.Module):
    """A layer over the outputs of all tables."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables
        self.layer = nn.Linear(8, 1).double()
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 8)[None])
            self.layer.bias.zero_()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        outputs = self.tables(inputs)
        found: Tensor = self.layer(torch.cat([outputs["sparse"], outputs["dense"]], 1))
        return found


def draw(trainer: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(100 * trainer + step)
    inputs = {
        "sparse": torch.randint(20, (5, 3), generator=generator),
        "dense": torch.randint(6, (5, 2), generator=generator),
    }
    return inputs, torch.randn(5, 1, generator=generator, dtype=torch.float64)


def train(trainer: int, is_in_context: bool) -> tuple[Tensor, Tensor, Tensor]:
    tables = Tables(PLAN, trainers=TRAINERS)
    model = DistributedDataParallel(Model(tables))
    rows, dense = tables.optimizer(SGD(lr=0.1)), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, target = draw(trainer, step)
        dense.zero_grad()
        if is_in_context:
            with autograd.context() as context_id:
                autograd.backward(context_id, [nn.functional.mse_loss(model(inputs), target)])
                for parameter, gradient in autograd.get_gradients(context_id).items():
                    parameter.grad = gradient
                rows.step(context_id)
        else:
            nn.functional.mse_loss(model(inputs), target).backward()
            rows.step()
        dense.step()
    found = tables.weights("sparse"), tables.weights("dense"), model.module.layer.weight.detach()
    distributed.barrier()
    tables.close()
    return found


class LocalTables(nn.Module):
    """The same tables in one process."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                each.name: nn.EmbeddingBag(
                    each.rows, each.dim, mode=each.pooling, _weight=weights[each.name]
                )
                for each in TABLES
            }
        )

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.bags[name](ids) for name, ids in inputs.items()}


@pytest.mark.parametrize("is_in_context", [False, True])
def test_tables_train_under_ddp_as_one_process_does(is_in_context: bool) -> None:
    initial = Tables(PLAN, name="initial")
    local = LocalTables({each.name: initial.weights(each.name) for each in TABLES})
    initial.close()
    model = Model(local)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        batches = [draw(trainer, step) for trainer in range(2)]
        inputs = {name: torch.cat([batch[name] for batch, _ in batches]) for name in batches[0][0]}
        optimizer.zero_grad()
        target = torch.cat([target for _, target in batches])
        nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
    expected = local.bags["sparse"].weight, local.bags["dense"].weight, model.layer.weight
    calls = [
        rpc.rpc_async(name, train, args=(number, is_in_context))
        for number, name in enumerate(TRAINERS)
    ]
    for call in calls:
        for found, weight in zip(call.wait(), expected, strict=True):
            assert (found - weight.detach()).abs().max() <= 1e-12
