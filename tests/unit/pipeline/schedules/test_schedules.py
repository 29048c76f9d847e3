"""Properties of every schedule."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings

from tests.thorough import SHARE, THOROUGH, share
from tests.unit.pipeline.schedules.all_schedules import (
    SINGLE,
    V_SHAPED,
    AnySchedule,
    every_schedule,
    replicated,
    schedules,
)
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.schedules import ScheduleLoopedBFS, SchedulePipeDream, Table, check

Drawn = tuple[AnySchedule, int]


@pytest.mark.parametrize("n_workers", range(1, 9))
def test_every_table_can_be_run_to_its_end(n_workers: int) -> None:
    every = list(every_schedule(n_workers))
    for schedule in every[:: 1 if THOROUGH else 2 * SHARE]:
        table = schedule.table(n_workers)
        check(table)
        assert table.n_workers == n_workers
        placement = schedule.placement(n_workers)
        for worker, stages in enumerate(placement):
            assert table.stages_of(worker) == tuple(sorted(stages))
        assert sorted(sum(placement, ())) == list(range(table.n_stages))


@settings(max_examples=share(200))
@given(replicated())
def test_every_table_with_replicas_can_be_run_to_its_end(drawn: Drawn) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    check(table)
    for stage in range(table.n_stages):
        workers = table.replicas(stage)
        for microbatch in range(table.n_microbatches):
            expected = workers[microbatch % len(workers)]
            assert table.worker_of(stage, microbatch) == expected


@settings(max_examples=share(100))
@given(schedules(most_workers=4))
def test_tables_survive_pickling_and_the_csv_form(drawn: Drawn) -> None:
    schedule, n_workers = drawn
    table = schedule.table(n_workers)
    arrived = pickle.loads(pickle.dumps(table))
    assert arrived == table
    assert arrived.worker_of(0, 0) == table.worker_of(0, 0)
    assert hash(arrived) == hash(table)
    again = Table.from_csv(table.to_csv(), name=table.name, weights=table.weights)
    assert again == table


@pytest.mark.parametrize("kind", [*SINGLE, *V_SHAPED, ScheduleLoopedBFS, SchedulePipeDream])
def test_counts_are_positive_integers(kind: type) -> None:
    with pytest.raises(ConfigurationError, match=r"n_mi\w+ is 0; pass 1 or more"):
        kind(0)
    with pytest.raises(ArgumentTypeError, match=r"n_mi\w+ is 2\.5, a float"):
        kind(2.5)
    with pytest.raises(ConfigurationError, match="n_workers is 0; pass 1 or more"):
        kind(8).table(0)
    with pytest.raises(ConfigurationError, match="n_workers is -1; pass 1 or more"):
        kind(8).placement(-1)
