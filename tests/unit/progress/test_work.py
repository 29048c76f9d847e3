"""Tests the state that results from events, in virtual time."""

from __future__ import annotations

import threading

import pytest
import torch

from torchweft.errors import CallCancelled
from torchweft.progress.work import (
    REMEMBERED,
    Loss,
    Straggler,
    Work,
    WorkerShare,
    readable_figure,
)

WORKERS = ["worker0", "worker1"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def work(clock: Clock) -> Work:
    return Work(None, clock)


def run_part(work: Work, map_id: int, part: int, worker: str, seconds: float) -> None:
    work.started(map_id, part, worker)
    work.ended(map_id, part, worker, seconds)


def states(work: Work) -> list[tuple[str, int, int, dict[str, int]]]:
    return [(job.name, job.parts, len(job.ended), job.running_on()) for job in work.jobs]


def test_nothing_yet(work: Work) -> None:
    assert (work.jobs, work.jobs_begun, work.parts_ended, work.workers) == ([], 0, 0, {})
    assert work.stragglers() == ()
    assert work.take_news() == []


def test_a_map_from_begin_to_end(work: Work) -> None:
    work.begun(1, "inner", 3, WORKERS)
    work.started(1, 0, "worker0")
    work.started(1, 1, "worker1")
    work.ended(1, 1, "worker1", 0.5)
    work.moved(1, 2, "worker0", "worker1")
    work.started(1, 2, "worker1")
    assert states(work) == [("inner", 3, 1, {"worker0": 1, "worker1": 1})]
    work.ended(1, 2, "worker1", 0.25)
    work.ended(1, 0, "worker0", 1.0)
    work.done(1, None)
    assert states(work) == [("inner", 3, 3, {"worker0": 0, "worker1": 0})]
    assert (work.jobs_begun, work.parts_ended, work.moves, work.reruns) == (1, 3, 1, 0)
    assert work.workers == {"worker0": WorkerShare(1, 1.0), "worker1": WorkerShare(2, 0.75)}


def test_what_is_asked_for_is_a_copy(work: Work) -> None:
    work.begun(1, "inner", 3, WORKERS)
    work.shares()["worker0"].parts = 7
    assert work.workers["worker0"].parts == 0


def test_a_part_that_hangs_is_behind_until_it_ends(work: Work, clock: Clock) -> None:
    work.begun(1, "inner", 3, WORKERS)
    run_part(work, 1, 0, "worker0", 0.4)
    work.started(1, 1, "worker1")
    clock.now = 1.2
    assert work.stragglers() == ()
    clock.now = 2.1
    straggler = Straggler("worker1", 1, "inner", 2.1, 0.4)
    assert work.stragglers() == (straggler,)
    work.ended(1, 1, "worker1", 2.1)
    assert work.stragglers() == ()
    assert work.workers["worker1"] == WorkerShare(1, 2.1, times_behind=1)


def test_who_fell_behind_is_news_once(work: Work, clock: Clock) -> None:
    work.begun(1, "inner", 3, WORKERS)
    run_part(work, 1, 0, "worker0", 0.4)
    work.started(1, 1, "worker1")
    clock.now = 2.0
    assert work.take_news() == [Straggler("worker1", 1, "inner", 2.0, 0.4)]
    clock.now = 3.0
    assert work.take_news() == []
    work.ended(1, 1, "worker1", 3.0)
    assert work.take_news() == []
    assert work.workers["worker1"].times_behind == 1


def test_a_part_that_was_behind_is_counted_though_nobody_looked(work: Work) -> None:
    work.begun(1, "inner", 3, WORKERS)
    run_part(work, 1, 0, "worker0", 0.4)
    run_part(work, 1, 1, "worker1", 2.0)
    assert work.take_news() == [Straggler("worker1", 1, "inner", 2.0, 0.4)]


def test_the_median_is_that_of_the_function_also_in_earlier_maps(work: Work, clock: Clock) -> None:
    work.begun(1, "fast", 1, WORKERS)
    run_part(work, 1, 0, "worker0", 0.1)
    work.done(1, None)
    work.begun(2, "fast", 1, WORKERS)
    work.begun(3, "slow", 1, WORKERS)
    work.started(2, 0, "worker0")
    work.started(3, 0, "worker1")
    clock.now = 5.0
    assert [straggler.name for straggler in work.stragglers()] == ["fast"]


def test_the_slowest_comes_first(work: Work, clock: Clock) -> None:
    work.begun(1, "inner", 3, WORKERS)
    run_part(work, 1, 0, "worker0", 0.1)
    work.started(1, 1, "worker0")
    clock.now = 1.0
    work.started(1, 2, "worker1")
    clock.now = 5.0
    assert [(found.part, found.seconds) for found in work.stragglers()] == [(1, 5.0), (2, 4.0)]


def test_maps_at_the_same_time_are_kept_apart(work: Work) -> None:
    """Such maps are a map within a part of another map, or maps of several threads."""
    work.begun(1, "outer", 2, WORKERS)
    work.started(1, 0, "worker0")
    work.begun(2, "inner", 2, ["worker1"])
    run_part(work, 2, 0, "worker1", 0.1)
    assert states(work) == [
        ("outer", 2, 0, {"worker0": 1, "worker1": 0}),
        ("inner", 2, 1, {"worker1": 0}),
    ]
    work.done(2, None)
    assert [job.name for job in work.jobs] == ["outer"]
    work.done(1, None)
    assert [job.name for job in work.jobs] == ["inner"]  # the map that began last


def test_a_loss_gives_parts_back(work: Work, clock: Clock) -> None:
    work.begun(1, "inner", 3, WORKERS)
    run_part(work, 1, 0, "worker1", 0.1)
    work.started(1, 1, "worker0")
    work.started(1, 2, "worker1")
    clock.now = 4.0
    assert work.take_news() == [
        Straggler("worker0", 1, "inner", 4.0, 0.1),
        Straggler("worker1", 2, "inner", 4.0, 0.1),
    ]
    work.lost(1, "worker1", [0, 2])
    assert states(work) == [("inner", 3, 0, {"worker0": 1, "worker1": 0})]
    assert work.jobs[0].lost == {"worker1"}
    assert work.take_news() == [Loss("worker1", (0, 2))]
    assert work.reruns == 2
    assert work.workers["worker1"] == WorkerShare(1, 0.1, times_behind=1, is_lost=True)
    run_part(work, 1, 0, "worker0", 0.1)
    run_part(work, 1, 2, "worker0", 0.1)
    assert work.jobs[0].ended == {0, 2}


def test_each_map_that_loses_parts_says_so(work: Work) -> None:
    work.begun(1, "outer", 3, WORKERS)
    work.begun(2, "inner", 3, WORKERS)
    work.begun(3, "inner", 3, WORKERS)
    work.lost(1, "worker1", [2])
    work.lost(2, "worker1", [0])
    work.lost(3, "worker1", [])
    assert work.take_news() == [Loss("worker1", (2,)), Loss("worker1", (0,))]


def test_maps_that_begin_after_a_loss_do_not_tell_it_again(work: Work) -> None:
    work.begun(1, "inner", 3, WORKERS)
    work.lost(1, "worker1", [])
    assert work.take_news() == [Loss("worker1", ())]
    work.done(1, None)
    work.begun(2, "inner", 3, WORKERS)
    work.lost(2, "worker1", [1, 2])
    assert work.take_news() == []
    assert work.reruns == 2


def test_a_worker_that_has_come_back_can_be_lost_again(work: Work) -> None:
    work.begun(1, "inner", 3, WORKERS)
    work.lost(1, "worker1", [0])
    work.begun(2, "inner", 3, WORKERS)
    run_part(work, 2, 0, "worker1", 0.1)
    assert not work.workers["worker1"].is_lost
    work.take_news()
    work.begun(3, "inner", 3, WORKERS)
    work.lost(3, "worker1", [0])
    assert work.take_news() == [Loss("worker1", (0,))]


def test_events_that_overtake_one_another(work: Work, clock: Clock) -> None:
    work.begun(1, "inner", 3, WORKERS)
    work.ended(1, 0, "worker0", 0.1)
    work.started(1, 0, "worker0")  # after its end
    work.lost(1, "worker1", [1])
    work.ended(1, 1, "worker1", 0.1)  # after its loss
    clock.now = 9.0
    assert states(work) == [("inner", 3, 1, {"worker0": 0, "worker1": 0})]
    assert work.stragglers() == ()
    assert work.parts_ended == 1


def test_events_of_maps_that_began_earlier_are_left_out(work: Work) -> None:
    run_part(work, 1, 0, "worker0", 0.1)
    work.lost(1, "worker0", [0])
    work.done(1, None)
    assert work.jobs == []
    assert work.workers == {}


def test_what_a_failed_map_left_behind_runs_no_more(work: Work, clock: Clock) -> None:
    work.begun(1, "inner", 2, WORKERS)
    run_part(work, 1, 0, "worker0", 0.1)
    work.started(1, 1, "worker1")
    work.done(1, ValueError("x"))
    clock.now = 9.0
    assert work.stragglers() == ()
    assert work.jobs[0].running_on() == {"worker0": 0, "worker1": 0}


@pytest.mark.parametrize(
    ("error", "failed"), [(None, 0), (CallCancelled("given up"), 0), (ValueError("x"), 1)]
)
def test_jobs_that_fail_are_counted(work: Work, error: BaseException | None, failed: int) -> None:
    work.begun(1, "inner", 2, WORKERS)
    work.done(1, error)
    work.done(1, error)
    assert work.jobs_failed == failed


def test_a_part_is_behind_after_three_medians(work: Work) -> None:
    work.begun(1, "inner", 9, WORKERS)
    for part, seconds in enumerate((0.4, 0.5, 2.0)):
        run_part(work, 1, part, "worker0", seconds)
    work.take_news()
    run_part(work, 1, 3, "worker1", 1.5)
    assert work.take_news() == []
    run_part(work, 1, 4, "worker1", 3.1)
    assert work.take_news() == [Straggler("worker1", 4, "inner", 3.1, 1.0)]


def test_no_part_is_behind_within_a_second(work: Work) -> None:
    work.begun(1, "inner", 3, WORKERS)
    run_part(work, 1, 0, "worker0", 0.001)
    run_part(work, 1, 1, "worker0", 1.0)
    assert work.take_news() == []


def test_the_first_part_of_a_name_has_nothing_to_be_compared_with(work: Work) -> None:
    work.begun(1, "inner", 1, WORKERS)
    run_part(work, 1, 0, "worker0", 0.001)
    work.begun(2, "outer", 1, WORKERS)
    run_part(work, 2, 0, "worker0", 1000.0)
    assert work.take_news() == []


def test_durations_of_long_ago_are_forgotten(work: Work) -> None:
    durations = [*[0.001] * 1000, *[5.0] * REMEMBERED]
    work.begun(1, "inner", len(durations) + 1, WORKERS)
    for part, seconds in enumerate(durations):
        run_part(work, 1, part, "worker0", seconds)
    work.take_news()
    run_part(work, 1, len(durations), "worker0", 14.0)
    assert work.take_news() == []


def test_many_threads_at_once(work: Work) -> None:
    def run_map(map_id: int) -> None:
        work.begun(map_id, "inner", 50, WORKERS)
        for part in range(50):
            run_part(work, map_id, part, WORKERS[part % 2], 2.0)
            with work.lock:
                work.stragglers()
        work.done(map_id, None)

    threads = [threading.Thread(target=run_map, args=(map_id,)) for map_id in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert work.workers == {worker: WorkerShare(200, 400.0) for worker in WORKERS}
    assert work.jobs_begun == 8


# The steps of a program's loop


def test_before_the_first_step_nothing_is_known(clock: Clock) -> None:
    work = Work(10, clock)
    clock.now = 5.0
    assert (work.per_s, work.left_s) == (None, None)


def test_the_rate_gives_the_remaining_time(clock: Clock) -> None:
    clock.now = 100.0
    work = Work(10, lambda: clock.now)
    for clock.now in (102.0, 104.0, 106.0):
        work.step(1)
    assert work.per_s == pytest.approx(0.5)
    assert work.left_s == pytest.approx(14.0)
    work.step(20)
    assert (work.steps, work.left_s) == (23, 0.0)


def test_a_figure_stays_until_there_is_another(work: Work) -> None:
    work.step(1, loss=0.5, accuracy=0.25)
    work.step(1, loss=0.25)
    assert work.figures == {"loss": "0.25", "accuracy": "0.25"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (float("nan"), "nan"),
        (1234567, "1234567"),
        ("warm-up", "warm-up"),
        (None, "None"),
        (torch.tensor(0.123456, requires_grad=True), "0.1235"),
        (torch.tensor([1.0, 2.0]), "tensor([1., 2.])"),
    ],
)
def test_figures_are_short(value: object, text: str) -> None:
    assert readable_figure(value) == text
