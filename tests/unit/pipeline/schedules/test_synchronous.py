"""Tests the synchronous schedules: phases, replicas, rounds, and the V."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
from hypothesis import given, settings

from tests.thorough import SHARE, THOROUGH, share
from tests.unit.pipeline.schedules.all_schedules import (
    SINGLE,
    V_SHAPED,
    AnySchedule,
    every_schedule,
    fits_rounds,
    replicated,
    schedules,
)
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleError,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleNaive,
    SchedulePipeDream,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    Table,
    check,
)

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


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_replicas_fit_workers_and_microbatches(kind: type) -> None:
    with pytest.raises(ScheduleError, match=r"sum is 5, or 4 workers"):
        kind(8, replicas=(3, 1)).table(5)
    with pytest.raises(ScheduleError, match=r"for each replica of a stage; pass 3 or more"):
        kind(2, replicas=(3, 1)).table(4)
    with pytest.raises(ConfigurationError, match=r"replicas are \(3, 0\); .*, each 1 or more"):
        kind(2, replicas=(3, 0))
    with pytest.raises(ArgumentTypeError, match=r"replicas is 4, an int; pass the number of"):
        kind(2, replicas=4)
    assert kind(3, replicas=[2, 1]).replicas == (2, 1)


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
def test_rounds_are_of_one_size(kind: type) -> None:
    for n_workers in (1, 3, 4):
        for m in range(1, 4 * n_workers):
            if fits_rounds(m, n_workers):
                kind(m).table(n_workers)
            else:
                with pytest.raises(ScheduleError) as caught:
                    kind(m).table(n_workers)
                *_, fewer, _, more = str(caught.value).split()
                assert int(fewer) < m < int(more)
                for fitting in (int(fewer), int(more)):
                    kind(fitting).table(n_workers)


def test_the_error_has_the_numbers() -> None:
    with pytest.raises(ScheduleError) as caught:
        ScheduleInterleaved1F1B(11, stages_per_worker=3).table(4)
    assert str(caught.value) == (
        "ScheduleInterleaved1F1B on 4 workers (12 stages) cannot have 11 micro-batches: it "
        "requires a multiple of p, or at least of n_microbatches // p, micro-batches; pass 10 or 12"
    )
    error = caught.value
    assert (error.schedule, error.n_workers, error.n_stages, error.n_microbatches) == (
        "ScheduleInterleaved1F1B",
        4,
        12,
        11,
    )
    assert isinstance(error, ConfigurationError)


@pytest.mark.parametrize("kind", V_SHAPED)
@pytest.mark.parametrize("n_workers", [1, 2, 5])
def test_a_v_needs_two_microbatches_for_each_worker(kind: type, n_workers: int) -> None:
    kind(2 * n_workers).table(n_workers)
    with pytest.raises(ScheduleError, match=rf"at least 2p .*; pass {2 * n_workers} or more$"):
        kind(2 * n_workers - 1).table(n_workers)


# Pictures


PICTURES = [
    (ScheduleNaive(2), 3),
    (ScheduleZBH1(4), 3),
    (ScheduleGPipe(4), 3),
    (Schedule1F1B(4), 3),
    (ScheduleLoopedBFS(3), 2),
    (ScheduleInterleaved1F1B(4), 2),
    (ScheduleInterleavedZeroBubble(2), 2),
    (ScheduleZBVZeroBubble(4), 2),
    (ScheduleDualPipeV(4), 2),
    (SchedulePipeDream(4), 3),
]


@pytest.mark.parametrize(("schedule", "count"), PICTURES, ids=lambda each: type(each).__name__)
def test_the_picture_above_a_schedule_is_its_table(schedule: Any, count: int) -> None:
    lines = inspect.cleandoc(type(schedule).__doc__).splitlines()
    drawn = [line.strip() for line in lines if line.strip().startswith(("step ", "worker "))]
    text = schedule.table(count).text().splitlines()
    assert len(drawn) == len(text) == count + 1
    assert all(row.startswith(line) for row, line in zip(text, drawn, strict=True))
