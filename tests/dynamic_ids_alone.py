"""Tables with dynamic ids as dicts of rows, trained in one process.

The initial values are those that Weft draws, by a function that is not public.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.dynamic_ids import BATCH, CONFIGS, draw_ids, loss_of
from torchweft.embedding import Rule, TableConfig, initial

_MASK = (1 << 64) - 1


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
