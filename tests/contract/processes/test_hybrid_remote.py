"""An embedding as a remote module, and a dense part under DDP: against one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import torchweft
from torchweft import rpc
from torchweft.errors import CallTimeout, ConfigurationError
from torchweft.hybrid import RemoteHybridModel, init_process_group
from torchweft.launch import Nursery, cluster
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS, SERVER = ["worker0", "worker1"], "worker2"
ROWS, WIDTH, STEPS = 9, 4, 6
CLIPPED = 0.05
unique = itertools.count()


def start(names: list[str], timeout_s: float = 20) -> str:
    return str(init_process_group(names, timeout=timeout_s))


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=3, nursery=nursery):
        for call in [rpc.rpc_async(name, start, (TRAINERS,)) for name in TRAINERS]:
            assert call.wait() == "gloo: CPUs of one host"
        yield


class Dense(nn.Module):
    """Two layers, each of which can be under a DDP of its own, and one that is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(WIDTH, 3)
        self.second: nn.Module = nn.Linear(3, 1)
        self.spare = nn.Linear(3, 1)
        self.uses_spare = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        found: Tensor = self.second(hidden)
        return found + self.spare(hidden) if self.uses_spare else found


def seeded(make: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def make_table(is_sparse: bool = False) -> nn.EmbeddingBag:
    table: nn.EmbeddingBag = seeded(lambda: nn.EmbeddingBag(ROWS, WIDTH, sparse=is_sparse))
    return table


def draw(trainer: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * trainer + step)
    ids = torch.randint(ROWS, (5, 3), generator=generator)
    return ids, torch.randn(5, 1, generator=generator, dtype=torch.float64)


def groups_of(model: RemoteHybridModel, trainers: int) -> list[Any]:
    """Returns groups for lr=0.1: each trainer makes a step of the table, with a part of that."""
    references = model.parameter_rrefs()
    return [{"params": references[:1], "lr": 0.1 / trainers}, {"params": references[1:]}]


def train(me: int, embedding: Any, form: str, passes: int = 1, clips: bool = False) -> Any:
    dense = seeded(Dense)
    options: dict[str, Any] = {"find_unused_parameters": True}
    if form == "several":
        del dense.spare
        dense.first = DistributedDataParallel(dense.first)
        dense.second = DistributedDataParallel(dense.second)
    model = RemoteHybridModel(embedding, dense, **options)
    optimizer = DistributedOptimizer(torch.optim.SGD, groups_of(model, len(TRAINERS)), lr=0.1)
    norms = []
    for step in range(STEPS):
        with torchweft.autograd.context() as context_id:
            for part in range(passes - 1):
                with model.no_sync():
                    torchweft.autograd.backward(context_id, [_loss(model, me, step + 50 * part)])
            loss = _loss(model, me, step + 50 * (passes - 1))
            torchweft.autograd.backward(context_id, [loss])
            if clips:
                norms.append(float(model.clip_grad_norm_(context_id, CLIPPED)))
            distributed.barrier()  # Else a step could come before a pass of the other trainer.
            optimizer.step(context_id)
            distributed.barrier()
    weights = [each.detach() for each in model.parameters()]
    return weights, norms


def _loss(model: Any, me: int, step: int) -> Tensor:
    ids, target = draw(me, step)
    return functional.mse_loss(model(ids), target)


def train_alone(passes: int, clips: bool, has_spare: bool) -> Any:
    table, dense = make_table(), seeded(Dense)
    if not has_spare:
        del dense.spare
    model = nn.Sequential(table, dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            batches = [draw(me, step + 50 * part) for me in range(len(TRAINERS))]
            ids, target = (torch.cat(each) for each in zip(*batches, strict=True))
            functional.mse_loss(model(ids), target).backward()
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)))
        optimizer.step()
    return table.weight.detach(), [each.detach() for each in dense.parameters()], norms


def weight_of(module: Any) -> Tensor:
    weight: Tensor = module.local_value().weight.detach()
    return weight


@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("passes", [1, 3], ids=["", "three passes"])
@pytest.mark.parametrize("form", ["one", "several", "reference", "sparse"])
def test_two_trainers_equal_one_process(form: str, passes: int, clips: bool) -> None:
    remote = RemoteModule(SERVER, make_table, (form == "sparse",))
    given = remote.get_module_rref() if form == "reference" else remote
    calls = [
        rpc.rpc_async(name, train, (me, given, form, passes, clips))
        for me, name in enumerate(TRAINERS)
    ]
    found = [call.wait() for call in calls]
    table, dense, norms = train_alone(passes, clips, has_spare=form != "several")
    rows = rpc.rpc_sync(SERVER, weight_of, (remote.get_module_rref(),))
    assert float((rows - table).abs().max()) <= 1e-12
    for weights, own in found:
        for mine, expected in zip(weights, dense, strict=True):
            assert float((mine - expected).abs().max()) <= 1e-12
        assert own == pytest.approx(norms, rel=1e-12)
    if clips:
        assert max(norms) > CLIPPED


def test_a_process_group_needs_each_of_its_trainers() -> None:
    with pytest.raises(ConfigurationError, match="'driver' makes a process group of"):
        init_process_group(TRAINERS)
    with pytest.raises(CallTimeout, match=SERVER):
        rpc.rpc_sync("worker0", start, (["worker0", SERVER], 0.3))


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(ConfigurationError, match="embedding is a Linear"):
        RemoteHybridModel(nn.Linear(2, 2), nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="dense is None"):
        RemoteHybridModel(RemoteModule(SERVER, make_table), None)  # type: ignore[arg-type]
