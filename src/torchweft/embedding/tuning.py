"""The number of servers that tables are cut over best, from steps of the running training.

More servers share the work on rows, but each adds a message: ``t(P) = b/P + a(P - 1) + c``, the
model of Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks"
(EuroSys 2019). Tables are cut over some numbers of servers, steps are timed with each, the model is
fitted, and they are cut over the number that it says. The steps are ordinary ones, and rows move
bit by bit, so nothing is lost for the training.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from torchweft import rpc
from torchweft.arguments import check_workers, did_you_mean
from torchweft.embedding.configs import RowWise, TableWise
from torchweft.embedding.errors import PlanError
from torchweft.embedding.planner import Plan
from torchweft.embedding.tables import Tables
from torchweft.errors import ConfigurationError

PARAMETERS = 3
"""The numbers of partitions that steps must be measured with, at least."""


class StepCost(NamedTuple):
    """The seconds of a step with P partitions: ``shared_s / P + message_s * (P - 1) + rest_s``.

    Attributes:
        shared_s: Work that the partitions share.
        message_s: Cost of each further partition.
        rest_s: Everything else.
    """

    shared_s: float
    message_s: float
    rest_s: float

    def step_s(self, partitions: int) -> float:
        """Returns the seconds of a step with a number of partitions."""
        return self.shared_s / partitions + self.message_s * (partitions - 1) + self.rest_s

    def best(self, limit: int) -> int:
        """Returns the number of partitions, from 1 to ``limit``, with the shortest step."""
        if self.message_s <= 0:
            return limit if self.shared_s > 0 else min((1, limit), key=self.step_s)
        lowest = math.sqrt(max(self.shared_s, 0.0) / self.message_s)
        near = {math.floor(lowest), math.ceil(lowest)}
        return min(sorted(min(max(each, 1), limit) for each in near), key=self.step_s)


def fit_step_cost(measured: Iterable[tuple[int, float]]) -> StepCost:
    """Fits the model to measured steps, by least squares.

    Args:
        measured: Pairs of a number of partitions and the seconds of a step; any number of each.

    Raises:
        ConfigurationError: There are fewer than three different numbers of partitions, or a
            number is below 1.
    """
    pairs = list(measured)
    counts = {partitions for partitions, _ in pairs}
    if len(counts) < PARAMETERS or min(counts) < 1:
        raise ConfigurationError(
            f"steps were measured with {sorted(counts)} partitions; the model needs at least "
            f"{PARAMETERS} different numbers, from 1 on"
        )
    system = torch.tensor([[1 / p, p - 1, 1] for p, _ in pairs], dtype=torch.float64, device="cpu")
    times = torch.tensor([[seconds] for _, seconds in pairs], dtype=torch.float64, device="cpu")
    shared, message, rest = torch.linalg.lstsq(system, times).solution.view(-1).tolist()
    return StepCost(shared, message, rest)


T = TypeVar("T")

_REASON = "tuned: t(P) of measured steps"


class Tuning(NamedTuple):
    """A decision about the number of servers, printed as a table.

    Attributes:
        measured: The seconds of a step, by number of servers: of the slowest trainer.
        cost: The model that was fitted.
        partitions: The number of servers over which the tables are cut now.
    """

    measured: dict[int, float]
    cost: StepCost
    partitions: int

    def __str__(self) -> str:
        """Returns measured and predicted times, with the decision."""
        lines = [f"{'servers':>7}  {'measured':>10}  {'predicted':>10}"]
        for count in sorted({*self.measured, self.partitions}):
            measured = self.measured.get(count)
            shown = "-" if measured is None else f"{measured * 1e3:.3f} ms"
            mark = "  chosen" if count == self.partitions else ""
            predicted = f"{self.cost.step_s(count) * 1e3:.3f} ms"
            lines.append(f"{count:>7}  {shown:>10}  {predicted:>10}{mark}")
        shared, message, rest = (1e3 * each for each in self.cost)
        lines.append(f"t(P) = {shared:.3f} / P + {message:.3f} (P - 1) + {rest:.3f} ms")
        return "\n".join(lines)


def tune_partitions(
    tables: Tables,
    make_step: Callable[[], Any],
    servers: Sequence[str],
    *,
    names: Sequence[str] | None = None,
    counts: Sequence[int] | None = None,
    steps: int = 5,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Cuts tables by row over the number of servers with the shortest step. Blocks.

    All trainers call it between the same two steps, with equal arguments. It makes
    ``(warm_up + steps)`` steps with each number of servers.

    Args:
        tables: The tables.
        make_step: Makes one step of the training.
        servers: The workers that may hold rows, in the order in which they are used; at least 3.
        names: The tables to cut; by default those that are cut by row now.
        counts: The numbers of servers to try, at least 3 different ones; by default the powers of
            two, 3 and all.
        steps: How many steps are timed with each.
        warm_up: How many are made before.
        clock: Returns the seconds now.

    Raises:
        ConfigurationError: There are too few servers or numbers of them, or an argument is of no
            use.
        PlanError: A name is of no table on servers, or there is none to cut.
        WorkerLost: A server or a trainer is lost.
    """
    check_workers(servers, "servers")
    tried = sorted(set(_default_counts(len(servers)) if counts is None else counts))
    if len(tried) < PARAMETERS or tried[0] < 1 or tried[-1] > len(servers):
        raise ConfigurationError(
            f"steps are to be timed with {tried} of {len(servers)} servers; the model needs at "
            f"least {PARAMETERS} different numbers, from 1 to the number of servers"
        )
    if steps < 1 or warm_up < 0:
        raise ConfigurationError(f"steps={steps} and warm_up={warm_up}; time at least one step")
    chosen = _tables_to_cut(tables.plan, names)
    measured = {}
    for count in tried:
        tables.reshard(_cut(tables.plan, chosen, servers[:count]))
        for _ in range(warm_up):
            make_step()
        measured[count] = max(_of_all(tables, _step_s(make_step, steps, clock)))
    # Least squares of the same numbers may differ in the last bits from process to process.
    cost = StepCost(*_of_all(tables, tuple(fit_step_cost(measured.items())))[0])
    best = cost.best(len(servers))
    if best != tried[-1]:
        tables.reshard(_cut(tables.plan, chosen, servers[:best]))
    return Tuning(measured, cost, best)


def _default_counts(servers: int) -> list[int]:
    powers = [1 << power for power in range(servers.bit_length())]
    return [each for each in (*powers, 3, servers) if each <= servers]


def _tables_to_cut(plan: Plan, names: Sequence[str] | None) -> list[str]:
    on_servers = [name for name, placed in plan.placed.items() if not placed.is_copied]
    if names is None:
        by_row = [name for name in on_servers if isinstance(plan.placed[name].place, RowWise)]
        if not by_row:
            raise PlanError("no table is cut by row; pass the names of those to cut")
        return by_row
    for name in names:
        if name not in on_servers:
            hint = did_you_mean(name, on_servers)
            raise PlanError(f"names has {name!r}, which is no table on servers{hint}", table=name)
    if not names:
        raise PlanError("names is empty; pass the names of the tables to cut")
    return list(names)


def _cut(plan: Plan, names: Sequence[str], servers: Sequence[str]) -> Plan:
    """Returns a plan in which some tables are cut by row over some servers."""
    placed = dict(plan.placed)
    for config in plan.configs:
        if config.name in names:
            own = servers[: config.rows]
            place = RowWise(*own) if len(own) > 1 else TableWise(own[0])
            placed[config.name] = placed[config.name]._replace(
                place=place, shards=place.shards(config), reason=_REASON
            )
    return dataclasses.replace(plan, placed=placed)


def _step_s(make_step: Callable[[], Any], steps: int, clock: Callable[[], float]) -> float:
    """Returns the median of the seconds of some steps."""
    seconds = []
    for _ in range(steps):
        began_s = clock()
        make_step()
        seconds.append(clock() - began_s)
    return statistics.median(seconds)


def _of_all(tables: Tables, own: T) -> list[T]:
    """Returns a value of each trainer, so that all decide the same; blocks."""
    if len(tables.trainers) == 1:
        return [own]
    gathered = rpc.all_gather(own, tables.trainers, timeout=tables.timeout_s)
    return [gathered[trainer] for trainer in tables.trainers]
