"""Training of tables with dynamic ids, on workers: ids, batches and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.embedding import (
    Dynamic,
    Normal,
    Plan,
    Rule,
    TableConfig,
    Tables,
    TablesOptimizer,
    Uniform,
)

CONFIGS = (
    TableConfig(
        "clicks", 24, 6, "sum", torch.float64, Normal(std=0.3), dynamic=Dynamic(2, "frequency")
    ),
    TableConfig("visits", 26, 4, "none", torch.float64, Uniform(-0.3, 0.3), -7, dynamic=Dynamic()),
    TableConfig("rare", 400, 4, "sum", torch.float64, dynamic=Dynamic(2, ttl=2)),
    TableConfig("often", 400, 4, "sum", torch.float64, dynamic=Dynamic(min_frequency=0.4)),
    TableConfig("tags", 25, 6, "max", torch.float64, Normal(std=0.3), dynamic=Dynamic(3, "age")),
    TableConfig("pages", 400, 6, "mean", torch.float64, Normal(std=0.3), dynamic=Dynamic()),
)
IDS_OF_A_STEP = 6  # half of the smallest part of a table, as there are two trainers
BATCH = 5


def pool_of_ids() -> Tensor:
    """Returns ids of all sizes and signs, of which some differ in high bits alone."""
    drawn = torch.randint(-(2**62), 2**62, (40,), generator=torch.Generator().manual_seed(5))
    special = [0, -1, 1, -7, 2**63 - 1, -(2**63), 2**57, 2**58, 2**33, -(2**57)]
    return torch.cat([torch.tensor(special), drawn])


def draw_ids(trainer: int, step: int) -> dict[str, Tensor]:
    """Returns what a trainer looks up: ids that come and go, a few of them often."""
    generator = torch.Generator().manual_seed(100 * step + trainer)
    pool, found = pool_of_ids(), {}
    for number, config in enumerate(CONFIGS):
        first = (7 * step + 3 * number) % len(pool)
        near = pool.roll(-first)[:12][torch.randperm(12, generator=generator)]
        few = torch.cat([pool[:3], near])[torch.randperm(6, generator=generator)]
        shape = (BATCH,) if config.pooling == "none" else (BATCH, 4)
        found[config.name] = few[torch.randint(IDS_OF_A_STEP, shape, generator=generator)]
    return found


def loss_of(outputs: Mapping[str, Tensor], trainer: int, step: int) -> Tensor:
    """Returns a loss to which every table contributes in another way."""
    total = torch.zeros(BATCH, dtype=torch.float64)
    for place, name in enumerate(sorted(outputs)):
        factors = torch.linspace(0.5, 1.5, outputs[name].shape[1], dtype=torch.float64)
        total = total + torch.tanh((outputs[name] * factors).mean(1)) * (place + 1)
    generator = torch.Generator().manual_seed(9000 + 100 * step + trainer)
    target = torch.randn(BATCH, generator=generator, dtype=torch.float64)
    return functional.mse_loss(total, target)


# Functions that workers run

_kept: dict[str, tuple[Tables, TablesOptimizer]] = {}


def open_dynamic(plan: Plan, rule: Rule, **options: Any) -> None:
    """Makes tables that stay open between calls of the test."""
    tables = Tables(plan, **options)
    _kept[tables.name] = tables, tables.optimizer(rule)


def step_dynamic(name: str, trainer: int, step: int) -> float:
    """Makes one step; returns the loss."""
    tables, optimizer = _kept[name]
    optimizer.zero_grad()
    loss = loss_of(tables(draw_ids(trainer, step)), trainer, step)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def rows_of(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns ids and rows of all tables."""
    tables, _ = _kept[name]
    return {config.name: tables.rows(config.name) for config in CONFIGS}


def occupancy_of(name: str) -> dict[str, Any]:
    """Returns how many ids there are."""
    return _kept[name][0].occupancy()


def save_dynamic(name: str, directory: str, step: int, since: int | None = None) -> None:
    """Saves open tables."""
    _kept[name][0].save(directory, step=step, since=since)


def restore_dynamic(name: str, directory: str) -> int:
    """Restores open tables; returns the step."""
    return _kept[name][0].restore(directory).step


def reshard_dynamic(name: str, plan: Plan) -> None:
    """Moves open tables to the places of another plan."""
    _kept[name][0].reshard(plan)


def close_dynamic(name: str) -> None:
    """Closes open tables."""
    _kept.pop(name)[0].close()
