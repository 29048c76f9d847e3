"""Tables with dynamic ids as dicts of rows in one process, and the same training on workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    initial,
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
_MASK = (1 << 64) - 1


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


@dataclass
class Row:
    """A row with all that is beside it."""

    weights: Tensor
    state: dict[str, Tensor]
    count: int
    age: int
    first: int


def server_by_definition(number: int, servers: int) -> int:
    """Returns the server of an id, in Python's integers."""
    mixed = number & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed ^= mixed >> 31
    return (mixed >> 33) % servers


class Part:
    """One server's part of a table, as dicts."""

    def __init__(self, config: TableConfig, capacity: int, rule: Rule, seed: int) -> None:
        assert config.dynamic is not None
        self.config, self.dynamic = config, config.dynamic
        self.capacity = capacity
        self.rule = rule
        self.seed = seed
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, tuple[int, int, int]] = {}
        self.step = 0
        self.admitted = self.evicted = self.dropped = 0

    def initial(self, number: int) -> Tensor:
        columns = range(self.config.dim)
        return initial.values_of_ids(self.config, torch.tensor([number]), columns, self.seed)

    def read(self, number: int) -> Tensor:
        """Returns ``(1, dim)``."""
        row = self.rows.get(number)
        return self.initial(number) if row is None else row.weights

    def apply(self, gradients: Mapping[int, Tensor]) -> None:
        """Makes a step with the gradient of each id, ``(1, dim)``."""
        self.step += 1
        new, patient = [], []
        for number in sorted(gradients):
            if number in self.rows:
                self.rows[number].count += 1
                self.rows[number].age = self.step
            else:
                count, _, first = self.waiting.pop(number, (0, 0, self.step))
                is_due = count + 1 >= self.dynamic.admit_after
                (new if is_due else patient).append((number, count + 1, first))
        self._admit(new)
        self._wait(patient)
        for number in sorted(gradients):
            if number in self.rows:
                row = self.rows[number]
                step = torch.tensor(float(self.step), dtype=torch.float64)
                self.rule.apply(row.weights, row.state, gradients[number], self.rule.lr, step)
        self._expire()

    def _expire(self) -> None:
        """Drops ids that have expired, at once."""
        done, ttl = self.step, self.dynamic.ttl
        for number, row in list(self.rows.items()):
            is_old = ttl is not None and done - row.age >= ttl
            if is_old or row.count < self.dynamic.min_frequency * (done - row.first + 1):
                del self.rows[number]
                self.evicted += 1
        for number, (_, age, _) in list(self.waiting.items()):
            if ttl is not None and done - age >= ttl:
                del self.waiting[number]
                self.dropped += 1

    def _admit(self, new: Sequence[tuple[int, int, int]]) -> None:
        lacking = len(self.rows) + len(new) - self.capacity
        if lacking > 0:

            def key(number: int) -> tuple[int, int, int]:
                row = self.rows[number]
                marks = (row.age, row.count)
                return (*(marks if self.dynamic.evict == "age" else marks[::-1]), number)

            others = sorted((each for each in self.rows if self._is_old(each)), key=key)
            for number in others[: max(lacking, self.capacity // 64)]:
                del self.rows[number]
                self.evicted += 1
        for number, count, first in new:
            weights = self.initial(number)
            self.rows[number] = Row(weights, self.rule.state_for(weights), count, self.step, first)
        self.admitted += len(new)

    def _is_old(self, number: int) -> bool:
        return self.rows[number].age != self.step

    def _wait(self, patient: Sequence[tuple[int, int, int]]) -> None:
        self.waiting |= {
            number: (count, self.step, first) for number, count, first in patient if count > 1
        }
        new = [number for number, count, _ in patient if count == 1]
        lacking = len(self.waiting) + len(new) - self.capacity
        if lacking > 0:
            others = sorted(
                (age, count, number)
                for number, (count, age, _) in self.waiting.items()
                if age != self.step
            )
            for _, _, number in others[: max(lacking, self.capacity // 64)]:
                del self.waiting[number]
                self.dropped += 1
        self.waiting |= dict.fromkeys(new, (1, self.step, self.step))


class OneProcess:
    """All tables, each with its parts, trained on the batches of all trainers."""

    def __init__(self, servers: int, rule: Rule, seed: int = 0) -> None:
        self.parts = {
            config.name: [
                Part(config, len(range(k, config.rows, servers)), rule, seed)
                for k in range(servers)
            ]
            for config in CONFIGS
        }

    def part(self, name: str, number: int) -> Part:
        parts = self.parts[name]
        return parts[server_by_definition(number, len(parts))]

    def train_step(self, trainers: int, step: int) -> list[float]:
        """Makes a step; returns the loss of each trainer."""
        total: dict[str, dict[int, Tensor]] = {config.name: {} for config in CONFIGS}
        losses = []
        for trainer in range(trainers):
            ids = draw_ids(trainer, step)
            loss, gradients = self._gradients(ids, trainer, step)
            losses.append(loss)
            for name, own in gradients.items():
                for number, gradient in own.items():
                    old = total[name].get(number)
                    total[name][number] = gradient if old is None else old + gradient
        for name, summed in total.items():
            for part in self.parts[name]:
                part.apply(
                    {
                        number: gradient / trainers
                        for number, gradient in summed.items()
                        if self.part(name, number) is part
                    }
                )
        return losses

    def _gradients(
        self, ids: Mapping[str, Tensor], trainer: int, step: int
    ) -> tuple[float, dict[str, dict[int, Tensor]]]:
        leaves: dict[str, dict[int, Tensor]] = {}
        outputs = {}
        for config in CONFIGS:
            given = ids[config.name]
            leaves[config.name] = own = {
                number: self.part(config.name, number).read(number).clone().requires_grad_()
                for number in given.unique().tolist()
            }
            bags = given.view(BATCH, -1).tolist()
            rows = torch.stack([torch.cat([own[number] for number in bag]) for bag in bags])
            pooled = {"sum": rows.sum(1), "none": rows.sum(1), "mean": rows.mean(1)}
            outputs[config.name] = pooled.get(config.pooling, rows.amax(1))
        loss = loss_of(outputs, trainer, step)
        loss.backward()  # type: ignore[no-untyped-call]
        padding = {config.name: config.padding_idx for config in CONFIGS}
        gradients = {
            name: {
                number: leaf.grad
                for number, leaf in own.items()
                if leaf.grad is not None and number != padding[name]
            }
            for name, own in leaves.items()
        }
        return loss.item(), gradients

    def rows(self, name: str) -> dict[int, Tensor]:
        """Returns the rows that ids have."""
        return {
            number: row.weights[0] for part in self.parts[name] for number, row in part.rows.items()
        }


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
