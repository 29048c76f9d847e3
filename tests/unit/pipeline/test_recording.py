"""Timelines out of workers' notes, also with clocks that differ."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from torchweft import rpc
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.ids import WorkerInfo
from torchweft.pipeline import recording
from torchweft.pipeline.recording import Notes, Recording, StepNotes, WorkerNotes, timelines_of
from torchweft.pipeline.schedules import ScheduleGPipe, Table, Timeline
from torchweft.probe import clock_id
from torchweft.reports import lead_of

TABLE = ScheduleGPipe(1).table(2)
EDGES = ((0, 1),)
WORKERS = [WorkerInfo("near", 1), WorkerInfo("far", 2)]
NEAR = StepNotes(4, [(100.0, 101.0), (103.5, 105.0)], 1)
FAR = StepNotes(4, [(31.0, 32.0), (32.0, 33.5)], 1)


def table_of(n_minibatches: int) -> Table:
    return TABLE


def bounds(timeline: Timeline) -> list[list[tuple[float, float]]]:
    return [[(span.start_s, span.end_s) for span in row] for row in timeline.spans]


def recorded(notes: Sequence[WorkerNotes]) -> Recording:
    found = Recording(table_of, EDGES, WORKERS, lambda: None, lambda: list(notes))
    with found:
        pass
    return found


def test_times_are_counted_from_the_first_action_on_one_clock() -> None:
    notes = [WorkerNotes("", [NEAR]), WorkerNotes("", [FAR])]
    (timeline,) = timelines_of(table_of, EDGES, notes, [0.0, -70.0])
    assert bounds(timeline) == [[(0, 1), (3.5, 5)], [(1, 2), (2, 3.5)]]
    assert timeline.makespan_s == 5
    assert timeline.is_measured
    assert timeline.title.endswith("% idle, measured")


def test_steps_that_one_worker_did_not_complete_are_left_out() -> None:
    notes = [
        WorkerNotes("", [NEAR._replace(step=step) for step in (4, 5, 6)]),
        WorkerNotes("", [FAR._replace(step=step) for step in (4, 6)]),
    ]
    assert len(timelines_of(table_of, EDGES, notes, [0.0, -70.0])) == 2


def reading(error_s: float, ahead_s: float) -> tuple[float, float, float]:
    return (5.0, 5.0 + error_s + ahead_s, 5.0 + 2 * error_s)


def test_another_clock_is_read_by_the_shortest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [reading(0.3, -70.2), reading(0.1, -70.0), reading(0.2, -69.9)]
    by_worker = {"far": readings}
    monkeypatch.setattr(recording, "_readings", lambda worker: by_worker[worker.name])
    found = recorded([WorkerNotes(clock_id(), [NEAR]), WorkerNotes("another", [FAR])])
    assert bounds(found.timeline)[1] == [(1, 2), (2, 3.5)]
    assert found.clock_error_s == pytest.approx(0.1)


def test_the_errors_of_two_other_clocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"near": [reading(0.02, 0.0)], "far": [reading(0.1, -70.0)]}
    monkeypatch.setattr(recording, "_readings", lambda worker: readings[worker.name])
    # A clock without an id is no other worker's.
    found = recorded([WorkerNotes("", [NEAR]), WorkerNotes("", [FAR])])
    assert bounds(found.timeline)[1] == [(1, 2), (2, 3.5)]
    assert found.clock_error_s == pytest.approx(0.12)


def test_a_reading_lies_within_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s, now_s = 1000.0, 5.0

    def later(delay_s: float) -> float:
        nonlocal now_s
        now_s += delay_s
        return now_s

    def call(worker: WorkerInfo, function: object) -> float:
        there_s = later(0.7) + ahead_s  # The request takes longer than the answer.
        later(0.1)
        return there_s

    monkeypatch.setattr(recording, "rpc_sync", call)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    found = lead_of(recording._readings(WORKERS[1]))
    assert found.error_s == pytest.approx(0.4)
    assert abs(found.ahead_s - ahead_s) <= found.error_s
    assert rpc.rpc_sync is not call


def test_the_time_of_a_wait_belongs_to_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 14.0, 16.0, 17.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    notes = Notes()
    notes.begin_step()
    notes.end_action()
    notes.end_wait()
    notes.end_action()
    notes.end_action()
    notes.end_step(3, 2)
    assert notes.steps == [StepNotes(3, [(10, 11), (14, 16), (16, 17)], 2)]


def test_the_median_step_stands_for_all() -> None:
    lengths = [3.0, 9.0, 1.0, 4.0]
    steps = [
        StepNotes(number, [(0.0, length), (length, length)], number)
        for number, length in enumerate(lengths)
    ]
    found = recorded([WorkerNotes(clock_id(), steps), WorkerNotes(clock_id(), steps)])
    assert [each.makespan_s for each in found.steps] == lengths
    assert found.timeline.makespan_s == 3
    assert found.peak_held == (3, 3)


def test_nothing_recorded_is_told() -> None:
    found = recorded([WorkerNotes(clock_id(), []), WorkerNotes(clock_id(), [NEAR])])
    for read in (lambda: found.timeline, lambda: found.predicted, found.report):
        with pytest.raises(ConfigurationError, match="no training step was recorded"):
            read()


def test_the_error_of_the_block_is_the_one_that_is_raised() -> None:
    def lost() -> list[WorkerNotes]:
        raise WorkerLost("far is lost", worker="far")

    with pytest.raises(KeyError), Recording(table_of, EDGES, WORKERS, lambda: None, lost):
        raise KeyError
    with pytest.raises(WorkerLost), Recording(table_of, EDGES, WORKERS, lambda: None, lost):
        pass
