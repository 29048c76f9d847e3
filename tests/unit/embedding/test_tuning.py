"""The number of servers that tables are cut over: the model, and steps that are timed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchweft import rpc
from torchweft.embedding import (
    Copies,
    PlanError,
    RowWise,
    StepCost,
    TableConfig,
    TableWise,
    Tuning,
    fit_step_cost,
    plan_tables,
    tune_partitions,
)
from torchweft.errors import ConfigurationError


@pytest.mark.parametrize(
    ("cost", "limit", "best"),
    [
        (StepCost(0.9, 0.1, 0), 8, 3),  # the root of 9
        (StepCost(0.9, 0.1, 0), 2, 2),
        (StepCost(0.7, 0.1, 5), 8, 3),  # between 2 and 3: 0.45 and 0.433
        (StepCost(0.05, 0.1, 0), 8, 1),
        (StepCost(0.9, 0.0, 0), 8, 8),
        (StepCost(0.9, -0.1, 0), 8, 8),
        (StepCost(-0.9, 0.1, 0), 8, 1),
        (StepCost(-0.9, -0.01, 0), 8, 1),
    ],
)
def test_the_best_number_has_the_shortest_step(cost: StepCost, limit: int, best: int) -> None:
    assert cost.best(limit) == best
    assert min(range(1, limit + 1), key=cost.step_s) == best


SERVERS = ["a", "b", "c", "d", "e", "f"]


class OneTrainer:
    """Tables whose steps take as long as a model says."""

    trainers: tuple[str, ...] = ("a",)
    timeout_s = 0.0

    def __init__(self, cost: StepCost) -> None:
        configs = [TableConfig("words", 90, 4), TableConfig("few", 2, 4), TableConfig("days", 7, 4)]
        places = {"words": RowWise(*SERVERS), "few": TableWise("a"), "days": Copies()}
        self.plan = plan_tables(configs, SERVERS, places=places)
        self.tried: list[int] = []
        self.now_s = 0.0
        self._cost = cost

    def reshard(self, plan: Any) -> None:
        self.plan = plan
        self.tried.append(len(plan.placed["words"].shards))

    def step(self) -> None:
        self.now_s += self._cost.step_s(self.tried[-1])

    def tune(self, **options: Any) -> Tuning:
        tables: Any = self
        return tune_partitions(tables, self.step, SERVERS, clock=lambda: self.now_s, **options)


@pytest.mark.parametrize(
    ("cost", "best"),
    [(StepCost(1.8, 0.2, 0.1), 3), (StepCost(0.0, 0.2, 0.1), 1), (StepCost(5.0, 0.1, 0.0), 6)],
)
def test_the_best_number_is_chosen_also_if_it_was_not_tried(cost: StepCost, best: int) -> None:
    tables = OneTrainer(cost)
    tuning = tables.tune(counts=[1, 2, 6])
    assert tuning.partitions == best
    assert tuning.cost == pytest.approx(cost, abs=1e-9)
    assert tables.tried == [1, 2, 6] + [best] * (best != 6)
    assert len(tables.plan.placed["words"].shards) == best
    chosen = [line for line in str(tuning).splitlines() if line.endswith("chosen")]
    assert [int(line.split()[0]) for line in chosen] == [best]


def test_trainers_whose_fits_differ_in_the_last_bits_take_the_same_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = StepCost(1.8, 0.2, math.nextafter(0.1, 1.0))

    def all_gather(own: Any, trainers: tuple[str, ...], timeout: float) -> dict[str, Any]:
        return dict(zip(trainers, [first if isinstance(own, tuple) else own, own], strict=True))

    monkeypatch.setattr(rpc, "all_gather", all_gather)
    tables = OneTrainer(StepCost(1.8, 0.2, 0.1))
    tables.trainers = ("a", "b")
    assert tables.tune(counts=[1, 2, 6]).cost == first


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"counts": [1, 2]}, ConfigurationError, r"\[1, 2\] of 6 servers; .* at least 3"),
        ({"counts": [1, 2, 7]}, ConfigurationError, "from 1 to the number of servers"),
        ({"counts": [0, 1, 2]}, ConfigurationError, "from 1"),
        ({"steps": 0}, ConfigurationError, "time at least one step"),
        ({"names": ["word"]}, PlanError, "did you mean 'words'"),
        ({"names": ["days"]}, PlanError, "'days', which is no table on servers"),
        ({"names": []}, PlanError, "names is empty"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_moves(
    options: Any, error: type[Exception], message: str
) -> None:
    tables = OneTrainer(StepCost(1.0, 0.1, 0.0))
    with pytest.raises(error, match=message):
        tables.tune(**options)
    assert tables.tried == []


def test_two_numbers_are_too_few() -> None:
    with pytest.raises(ConfigurationError, match=r"\[1, 2\] partitions.*3 different"):
        fit_step_cost([(1, 0.1), (2, 0.1), (2, 0.2)])
