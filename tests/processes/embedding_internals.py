"""Functions that read internals; ``embedding_functions.py`` in the contract has the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.contract.processes.embedding_functions import _kept, skewed
from torchweft.embedding import (
    Normal,
    Plan,
    Rule,
    TableConfig,
    Tables,
)
from torchweft.embedding.server import host_of


def set_rule_of_server(name: str, rule: Rule | None) -> None:
    """Sets or takes away the optimizer of the rows on this worker, behind the trainers' back."""
    host_of(name).rule = rule


def refuse_to_change(name: str) -> None:
    """Has this worker fail when it changes rows."""

    def change(*_: object) -> None:
        raise MemoryError("no memory for the step")

    for shard in host_of(name).shards.values():
        shard._change = change  # type: ignore[method-assign]


class Losses:
    """The losses of a program, as its own part of a snapshot."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state["found"]


def save_tables(name: str, directory: str, step: int, since: int | None = None) -> int:
    """Saves open tables, and losses that tell the step."""
    losses = Losses()
    losses.found = [step / 4]
    return (
        _kept[name][0]
        .save(directory, step=step, state={"losses": losses}, keep=1, since=since)
        .step
    )


def restore_tables(name: str, directory: str) -> tuple[int, list[float]]:
    """Restores open tables; returns the step and the saved losses."""
    losses = Losses()
    snapshot = _kept[name][0].restore(directory, state={"losses": losses})
    return snapshot.step, losses.found


def set_rate(name: str, rate: float) -> None:
    """Sets the learning rate of open tables."""
    _kept[name][1].param_groups[0]["lr"] = rate


def weights_of(name: str) -> dict[str, Tensor]:
    """Returns all rows of open tables."""
    tables = _kept[name][0]
    return {each.name: tables.weights(each.name) for each in tables.plan.configs}


ORDERED = TableConfig("pages", 17, 6, "none", torch.float64, Normal(std=0.3))


def ordered_ids(trainer: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(77 * trainer + step)
    return skewed(9, ORDERED.rows, generator)


def ordered_gradients(rows: Tensor, trainer: int, step: int) -> Tensor:
    """Returns the gradient of a trainer's loss by the looked-up rows, ``(9, dim)``."""
    generator = torch.Generator().manual_seed(500 + 77 * trainer + step)
    factors = torch.randn(9, ORDERED.dim, generator=generator, dtype=torch.float64)
    return 2 * rows * factors


def train_ordered(
    plan: Plan, trainers: Sequence[str], me: int, rule: Rule, steps: int, **options: Any
) -> Tensor:
    """Trains one table with gradients that the test can repeat; returns its rows."""
    tables = Tables(plan, trainers=trainers, name="ordered", **options)
    optimizer = tables.optimizer(rule)
    for step in range(steps):
        optimizer.zero_grad()
        found = tables({"pages": ordered_ids(me, step)})["pages"]
        found.backward(ordered_gradients(found.detach(), me, step))
        optimizer.step()
    rows = tables.weights("pages")
    tables.close()
    return rows


def train_ordered_alone(
    weights: Tensor, trainers: int, rule: Rule, steps: int, divisor: int
) -> Tensor:
    """Does the same in one process: sums by trainer, and by occurrence within a trainer."""
    state = rule.state_for(weights)
    for step in range(steps):
        sums: dict[int, Tensor] = {}
        for trainer in range(trainers):
            own: dict[int, Tensor] = {}
            ids = ordered_ids(trainer, step)
            gradients = ordered_gradients(weights[ids], trainer, step)
            for row, gradient in zip(ids.tolist(), gradients, strict=True):
                own[row] = own[row] + gradient if row in own else gradient
            for row, gradient in own.items():
                sums[row] = sums[row] + gradient if row in sums else gradient
        rows = torch.tensor(sorted(sums))
        joined = torch.stack([sums[row] for row in rows.tolist()]) / divisor
        some, of_some = weights[rows], {name: each[rows] for name, each in state.items()}
        count = torch.tensor(step + 1, dtype=torch.float64)
        rule.apply(some, of_some, joined, rule.lr, count)
        weights[rows] = some
        for name, values in of_some.items():
            state[name][rows] = values
    return weights
