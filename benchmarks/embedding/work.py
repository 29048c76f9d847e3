"""The works: lookups, and steps of training, with tables on all other workers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
from benchmarks.frame.api import Api, current
from benchmarks.frame.work import Numbers, Work


def works(api: Api) -> dict[str, Work | Numbers]:
    """Returns the works of each shape."""
    kind = {"torch.distributed": OnTorch, "torchweft": OnWeft}[api.package]
    found: dict[str, Work | Numbers] = {}
    for shape in SHAPES:
        # Made on the first order, so that a side that fails does not affect others.
        made = functools.cache(functools.partial(kind, shape, tuple(api.peers)))
        found |= {
            f"{shape.name} losses": Numbers(_told(made)),
            f"{shape.name} lookup": Work(_run(made, "lookup")),
            f"{shape.name} step": Work(_run(made, "step")),
        }
    return found


def _told(made: Callable[[], Any]) -> Callable[[], list[float]]:
    return lambda: [made().step() for _ in range(CHECKED_STEPS)]


def _run(made: Callable[[], Any], name: str) -> Callable[[], object]:
    return lambda: getattr(made(), name)()


class OnWeft:
    """Tables of ``torchweft.embedding``, each whole on the server that the plan gives it."""

    def __init__(self, shape: Shape, servers: tuple[str, ...]) -> None:
        from torchweft import embedding
        from torchweft.embedding import Constant, TableConfig, Tables, plan_tables

        self._names = [f"table{number}" for number in range(shape.tables)]
        configs = [
            TableConfig(name, shape.rows, shape.dim, shape.pooling, initial=Constant())
            for name in self._names
        ]
        self._tables = Tables(plan_tables(configs, servers), name=shape.name)
        rule = getattr(embedding, shape.rule)(lr=LR)
        self._optimizer = self._tables.optimizer(rule)
        for number, name in enumerate(self._names):
            self._tables.set_weights(name, initial_values(shape, number))
        batches = [draw(shape, number) for number in range(BATCHES)]
        self._batches = itertools.cycle(
            [dict(zip(self._names, ids, strict=True)) for ids in batches]
        )

    def lookup(self) -> None:
        with torch.no_grad():
            self._tables(next(self._batches))

    def step(self) -> float:
        loss = loss_of(list(self._tables(next(self._batches)).values()))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()


class TorchTables(nn.Module):
    """Whole tables on one server, with sparse gradients."""

    def __init__(self, shape: Shape, numbers: list[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(_module(shape, number) for number in numbers)

    def forward(self, ids: list[Tensor]) -> list[Tensor]:
        return [table(each) for table, each in zip(self.tables, ids, strict=True)]


def _module(shape: Shape, number: int) -> nn.Module:
    size, values = (shape.rows, shape.dim), initial_values(shape, number)
    if shape.pooling == "sum":
        return nn.EmbeddingBag(*size, mode="sum", sparse=True, _weight=values)
    return nn.Embedding(*size, sparse=True, _weight=values)


def look_up(reference: Any, ids: list[Tensor]) -> list[Tensor]:
    """Looks ids up in the tables of a server; runs there."""
    found: list[Tensor] = reference.local_value()(ids)
    return found


def parameters_of(reference: Any) -> list[Any]:
    """Returns references to the tables of a server; runs there."""
    return [current().rpc.RRef(each) for each in reference.local_value().parameters()]


class OnTorch:
    """Whole tables in turn on the servers; one call to each server for all of its tables."""

    def __init__(self, shape: Shape, servers: tuple[str, ...]) -> None:
        self._api = current()
        rpc = self._api.rpc
        count = len(servers)
        self._parts = [
            rpc.remote(server, TorchTables, args=(shape, list(range(place, shape.tables, count))))
            for place, server in enumerate(servers)
        ]
        parameters = [
            parameter
            for part in self._parts
            for parameter in rpc.rpc_sync(part.owner(), parameters_of, args=(part,))
        ]
        rule = getattr(torch.optim, shape.rule)
        self._optimizer = self._api.optim.DistributedOptimizer(rule, parameters, lr=LR)
        self._batches = itertools.cycle([draw(shape, number) for number in range(BATCHES)])

    def _outputs(self) -> list[Tensor]:
        ids, count = next(self._batches), len(self._parts)
        futures = [
            self._api.rpc.rpc_async(part.owner(), look_up, args=(part, ids[place::count]))
            for place, part in enumerate(self._parts)
        ]
        return [output for future in futures for output in future.wait()]

    def lookup(self) -> None:
        with torch.no_grad():
            self._outputs()

    def step(self) -> float:
        with self._api.autograd.context() as context_id:
            loss = loss_of(self._outputs())
            self._api.autograd.backward(context_id, [loss])
            self._optimizer.step(context_id)
        return loss.item()
