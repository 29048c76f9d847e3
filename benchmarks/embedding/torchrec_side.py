"""The torchrec side: tables are spread whole over all ranks, each of which trains on a part.

That is how torchrec trains: it has no servers beside the trainers. So the group has as many
processes as a trainer and its servers have, and the ranks share the work of the trainer.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.embedding.shapes import (
    BATCHES,
    CHECKED_STEPS,
    LR,
    SHAPES,
    Shape,
    draw,
    initial_values,
    loss_of,
)
from benchmarks.frame.place import Place
from benchmarks.frame.work import Numbers, Work

STEPS = 5
"""Steps that one order to the other ranks makes."""


class Rank:
    """The tables of a shape on this rank, under ``DistributedModelParallel`` on the CPU."""

    def __init__(self, shape: Shape) -> None:
        torchrec: Any = importlib.import_module("torchrec")
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._names = [f"table{number}" for number in range(shape.tables)]
        self._is_pooled = shape.pooling == "sum"
        self._model = self._sharded(torchrec, shape)
        self._set_weights(shape)
        batches = [self._own(torchrec, shape, draw(shape, number)) for number in range(BATCHES)]
        self._batches: Iterator[Any] = itertools.cycle(batches)

    def _sharded(self, torchrec: Any, shape: Shape) -> Any:
        parallel: Any = importlib.import_module("torchrec.distributed.model_parallel")
        plans: Any = importlib.import_module("torchrec.distributed.sharding_plan")
        types: Any = importlib.import_module("torchrec.distributed.types")
        fused: Any = importlib.import_module("torchrec.optim.apply_optimizer_in_backward")
        module, sharder = self._collection(torchrec, shape)
        rule = getattr(torch.optim, shape.rule)
        # FBGEMM's default of eps differs from that of torch.optim.
        options = {"lr": LR} if shape.rule == "SGD" else {"lr": LR, "eps": 1e-10}
        fused.apply_optimizer_in_backward(rule, module.parameters(), options)
        places = {
            name: plans.table_wise(rank=number % self._size, compute_kernel="fused")
            for number, name in enumerate(self._names)
        }
        plan = plans.construct_module_sharding_plan(
            module,
            places,
            sharder=sharder,
            world_size=self._size,
            local_size=self._size,
            device_type="cpu",
        )
        return parallel.DistributedModelParallel(
            module,
            device=torch.device("cpu"),
            env=types.ShardingEnv.from_process_group(dist.group.WORLD),
            plan=types.ShardingPlan(plan={"": plan}),
            sharders=[sharder],
        )

    def _collection(self, torchrec: Any, shape: Shape) -> tuple[Any, Any]:
        """Returns all tables as one module, and what shards it."""
        common = [
            {
                "name": name,
                "num_embeddings": shape.rows,
                "embedding_dim": shape.dim,
                "feature_names": [name],
            }
            for name in self._names
        ]
        meta = torch.device("meta")
        if self._is_pooled:
            sharding: Any = importlib.import_module("torchrec.distributed.embeddingbag")
            bags = [torchrec.EmbeddingBagConfig(**each) for each in common]
            module = torchrec.EmbeddingBagCollection(tables=bags, device=meta)
            return module, sharding.EmbeddingBagCollectionSharder()
        sharding = importlib.import_module("torchrec.distributed.embedding")
        rows = [torchrec.EmbeddingConfig(**each) for each in common]
        module = torchrec.EmbeddingCollection(tables=rows, device=meta)
        return module, sharding.EmbeddingCollectionSharder()

    @torch.no_grad()
    def _set_weights(self, shape: Shape) -> None:
        found = {}
        for key, value in self._model.state_dict().items():
            number = self._names.index(key.split(".")[-2])
            for shard in value.local_shards():
                shard.tensor.copy_(initial_values(shape, number))
                found[number] = shard
        assert sorted(found) == list(range(self._rank, shape.tables, self._size))

    def _own(self, torchrec: Any, shape: Shape, ids: list[Tensor]) -> Any:
        """Returns this rank's bags of a batch."""
        own = [each.tensor_split(self._size)[self._rank] for each in ids]
        lengths = torch.full((shape.tables * len(own[0]),), shape.length, dtype=torch.int32)
        return torchrec.KeyedJaggedTensor(
            keys=self._names, values=torch.cat([each.reshape(-1) for each in own]), lengths=lengths
        )

    def _outputs(self) -> list[Tensor]:
        found = self._model(next(self._batches)).wait()
        if self._is_pooled:
            return [found[name] for name in self._names]
        return [found[name].values() for name in self._names]

    def lookup(self) -> None:
        """Looks a batch up."""
        with torch.no_grad():
            self._outputs()

    def step(self) -> float:
        """Makes a step; the optimizer runs in the backward pass. Returns this rank's loss."""
        loss = loss_of(self._outputs())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def told(self) -> list[float]:
        """Makes the first steps; returns the losses of the whole batches."""
        losses = torch.tensor([self.step() for _ in range(CHECKED_STEPS)], dtype=torch.float64)
        dist.all_reduce(losses)
        return (losses / self._size).tolist()


made = functools.cache(Rank)


def _follow(shape: Shape, name: str) -> object:
    act = getattr(made(shape), name)
    return act() if name == "told" else [act() for _ in range(STEPS)]


@functools.cache
def _orders() -> list[Callable[[], object]]:
    """Returns the orders that the first rank gives to all, by number; the first ends them."""
    found: list[Callable[[], object]] = [lambda: None]
    for shape in SHAPES:
        found += [functools.partial(_follow, shape, name) for name in ("told", "lookup", "step")]
    return found


def _ordered(number: int) -> Any:
    """Has all ranks follow an order, also this one; returns its result."""
    dist.broadcast(torch.tensor([number]), 0)
    return _orders()[number]()


def join(place: Place) -> None:
    """Makes this process a rank of the group."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
        LOCAL_RANK=str(place.rank),
        LOCAL_WORLD_SIZE=str(place.size),
        GLOO_SOCKET_IFNAME="lo",
    )
    dist.init_process_group("gloo", rank=place.rank, world_size=place.size)


def works() -> dict[str, Work | Numbers]:
    """Returns the works of each shape, on the first rank."""
    found: dict[str, Work | Numbers] = {}
    for place, shape in enumerate(SHAPES):
        order = 1 + 3 * place
        found |= {
            f"{shape.name} losses": Numbers(functools.partial(_ordered, order)),
            f"{shape.name} lookup": Work(functools.partial(_ordered, order + 1), STEPS),
            f"{shape.name} step": Work(functools.partial(_ordered, order + 2), STEPS),
        }
    return found


def serve() -> None:
    """Follows the orders of the first rank, on another one, until the last."""
    number = torch.ones(1, dtype=torch.int64)
    while int(number):
        dist.broadcast(number, 0)
        _orders()[int(number)]()
    dist.destroy_process_group()


def leave() -> None:
    """Ends the orders, on the first rank."""
    _ordered(0)
    dist.destroy_process_group()
