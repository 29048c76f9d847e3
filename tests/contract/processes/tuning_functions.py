"""Trainers that tune the number of servers, which count what they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft import rpc
from torchweft.embedding import (
    Dynamic,
    Plan,
    RowWise,
    SparseAdam,
    TableConfig,
    Tables,
    TablesOptimizer,
    Tuning,
    plan_tables,
    tune_partitions,
)

ROWS, BATCH, DIM = 400, 40, 4
MESSAGE_COST, ROW_COST = 10.0, 1.0
CONFIGS = (
    TableConfig("words", ROWS, DIM, "none", torch.float64),
    TableConfig("users", ROWS, DIM, "none", torch.float64, dynamic=Dynamic(2)),
    TableConfig("days", 7, 2, "none", torch.float64),
)
_asked: Counter[tuple[int, str]] = Counter()


def plan_on(servers: Sequence[str], whole: str) -> Plan:
    """Returns a plan with two tables by row."""
    places = {"words": RowWise(*servers), "users": RowWise(*servers)}
    return plan_tables(CONFIGS, [whole], trainers=2, places=places)


def asked(trainer: int) -> tuple[int, int]:
    """Returns how many messages and rows a trainer has asked this worker for."""
    return _asked[trainer, "messages"], _asked[trainer, "rows"]


class CountedClock:
    """Time passes by what the servers are asked for: rows at once, messages one after the other."""

    def __init__(self, trainer: int, servers: Sequence[str]) -> None:
        self._trainer = trainer
        self._servers = servers
        self._before = [(0, 0)] * len(servers)
        self._now = 0.0

    def __call__(self) -> float:
        found = [rpc.rpc_sync(server, asked, (self._trainer,)) for server in self._servers]
        grown = [
            (now[0] - then[0], now[1] - then[1])
            for now, then in zip(found, self._before, strict=True)
        ]
        self._before = found
        self._now += MESSAGE_COST * sum(messages for messages, _ in grown)
        self._now += ROW_COST * max(rows for _, rows in grown)
        return self._now


class Training:
    """The training of one trainer."""

    def __init__(self, plan: Plan, trainers: Sequence[str], me: int, name: str) -> None:
        self.tables = Tables(plan, trainers=trainers, name=name)
        self.optimizer: TablesOptimizer = self.tables.optimizer(SparseAdam(lr=0.1))
        self._me = me
        self._step = 0

    def step(self) -> None:
        begin = BATCH * (self._step + 3 * self._me)
        ids = torch.arange(begin, begin + BATCH) % ROWS
        inputs = {"words": ids, "users": ids // 3 - 50, "days": ids % 7}
        self.optimizer.zero_grad()
        out = self.tables(inputs)
        weight = 1.0 + self._step + self._me
        sum((each + 1).square().sum() * weight for each in out.values()).backward()  # type: ignore[union-attr]
        self.optimizer.step()
        self._step += 1

    def content(self) -> dict[str, Tensor]:
        """Returns all rows; of dynamic ids in their order."""
        ids, rows = self.tables.rows("users")
        found = {name: self.tables.weights(name) for name in ("words", "days")}
        return {**found, "ids": ids, "users": rows}


def train(
    me: int,
    trainers: Sequence[str],
    servers: Sequence[str],
    steps: int,
    work: Callable[[Training], Any] | None = None,
) -> tuple[dict[str, Tensor], Any]:
    """Makes steps, after some that ``work`` makes; returns the rows, and the result of ``work``."""
    name = "tuned" if work else "plain"
    training = Training(plan_on(servers[:3], servers[0]), trainers, me, name)
    found = None if work is None else work(training)
    while training._step < steps:
        training.step()
    rpc.barrier(trainers)
    content = training.content()
    rpc.barrier(trainers)
    training.tables.close()
    return content, found


def tuned(
    me: int, trainers: Sequence[str], servers: Sequence[str], steps: int
) -> tuple[dict[str, Tensor], Tuning]:
    """Trains, and tunes the number of servers in the course of it."""

    def work(training: Training) -> tuple[Tuning, list[str]]:
        training.step()
        found = tune_partitions(
            training.tables,
            training.step,
            servers,
            steps=2,
            warm_up=1,
            clock=CountedClock(me, servers),
        )
        places = training.tables.plan.placed
        return found, [str(places[name].place) for name in ("words", "users", "days")]

    return train(me, trainers, servers, steps, work)
