"""What is remembered of maps, in virtual time."""

from __future__ import annotations

import threading

import pytest

from torchweft.mapreduce.display.activity import Activity, Loss, MapView, WorkerShare
from torchweft.mapreduce.display.stragglers import Straggler

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
def activity(clock: Clock) -> Activity:
    return Activity(clock)


def run_part(activity: Activity, map_id: int, part: int, worker: str, seconds: float) -> None:
    activity.started(map_id, part, worker)
    activity.ended(map_id, part, worker, seconds)


def test_nothing_yet(activity: Activity) -> None:
    view = activity.view()
    assert (view.maps, view.maps_begun, view.parts, view.workers) == ((), 0, 0, {})
    assert activity.stragglers() == ()
    assert activity.take_news() == []


def test_a_map_from_begin_to_end(activity: Activity) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    activity.started(1, 0, "worker0")
    activity.started(1, 1, "worker1")
    activity.ended(1, 1, "worker1", 0.5)
    activity.moved(1, 2, "worker0", "worker1")
    activity.started(1, 2, "worker1")
    [seen] = activity.view().maps
    assert seen == MapView("inner", 3, 1, {"worker0": 1, "worker1": 1}, frozenset())
    activity.ended(1, 2, "worker1", 0.25)
    activity.ended(1, 0, "worker0", 1.0)
    activity.done(1, None)
    view = activity.view()
    assert view.maps == (MapView("inner", 3, 3, {"worker0": 0, "worker1": 0}, frozenset()),)
    assert (view.maps_begun, view.parts, view.moved, view.rerun) == (1, 3, 1, 0)
    assert view.workers == {"worker0": WorkerShare(1, 1.0), "worker1": WorkerShare(2, 0.75)}
    assert view.workers == activity.workers()


def test_what_is_asked_for_is_a_copy(activity: Activity) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    activity.workers()["worker0"].parts = 7
    activity.view().workers["worker0"].parts = 7
    assert activity.workers()["worker0"].parts == 0


def test_a_part_that_hangs_is_behind_until_it_ends(activity: Activity, clock: Clock) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    run_part(activity, 1, 0, "worker0", 0.4)
    activity.started(1, 1, "worker1")
    clock.now = 1.2
    assert activity.stragglers() == ()
    clock.now = 2.1
    straggler = Straggler("worker1", 1, "inner", 2.1, 0.4)
    assert activity.stragglers() == (straggler,)
    assert activity.view().stragglers == (straggler,)
    activity.ended(1, 1, "worker1", 2.1)
    assert activity.stragglers() == ()
    assert activity.workers()["worker1"] == WorkerShare(1, 2.1, times_behind=1)


def test_who_fell_behind_is_news_once(activity: Activity, clock: Clock) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    run_part(activity, 1, 0, "worker0", 0.4)
    activity.started(1, 1, "worker1")
    clock.now = 2.0
    assert activity.take_news() == [Straggler("worker1", 1, "inner", 2.0, 0.4)]
    clock.now = 3.0
    assert activity.take_news() == []
    activity.ended(1, 1, "worker1", 3.0)
    assert activity.take_news() == []
    assert activity.workers()["worker1"].times_behind == 1


def test_a_part_that_was_behind_is_counted_though_nobody_looked(activity: Activity) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    run_part(activity, 1, 0, "worker0", 0.4)
    run_part(activity, 1, 1, "worker1", 2.0)
    assert activity.take_news() == [Straggler("worker1", 1, "inner", 2.0, 0.4)]


def test_the_median_is_that_of_the_function_also_in_earlier_maps(
    activity: Activity, clock: Clock
) -> None:
    activity.begun(1, "fast", 1, WORKERS)
    run_part(activity, 1, 0, "worker0", 0.1)
    activity.done(1, None)
    activity.begun(2, "fast", 1, WORKERS)
    activity.begun(3, "slow", 1, WORKERS)
    activity.started(2, 0, "worker0")
    activity.started(3, 0, "worker1")
    clock.now = 5.0
    assert [straggler.name for straggler in activity.stragglers()] == ["fast"]


def test_the_slowest_comes_first(activity: Activity, clock: Clock) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    run_part(activity, 1, 0, "worker0", 0.1)
    activity.started(1, 1, "worker0")
    clock.now = 1.0
    activity.started(1, 2, "worker1")
    clock.now = 5.0
    assert [(found.part, found.seconds) for found in activity.stragglers()] == [(1, 5.0), (2, 4.0)]


def test_maps_at_the_same_time_are_kept_apart(activity: Activity) -> None:
    """As with a map within a part of another, or maps of several threads."""
    activity.begun(1, "outer", 2, WORKERS)
    activity.started(1, 0, "worker0")
    activity.begun(2, "inner", 2, ["worker1"])
    run_part(activity, 2, 0, "worker1", 0.1)
    assert [(seen.name, seen.ended, seen.running) for seen in activity.view().maps] == [
        ("outer", 0, {"worker0": 1, "worker1": 0}),
        ("inner", 1, {"worker1": 0}),
    ]
    activity.done(2, None)
    assert [seen.name for seen in activity.view().maps] == ["outer"]
    activity.done(1, None)
    assert [seen.name for seen in activity.view().maps] == ["inner"]  # the one that began last


def test_a_loss_gives_parts_back(activity: Activity, clock: Clock) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    run_part(activity, 1, 0, "worker1", 0.1)
    activity.started(1, 1, "worker0")
    activity.started(1, 2, "worker1")
    clock.now = 4.0
    assert activity.take_news() == [
        Straggler("worker0", 1, "inner", 4.0, 0.1),
        Straggler("worker1", 2, "inner", 4.0, 0.1),
    ]
    activity.lost(1, "worker1", [0, 2])
    [seen] = activity.view().maps
    assert seen == MapView("inner", 3, 0, {"worker0": 1, "worker1": 0}, frozenset({"worker1"}))
    assert activity.take_news() == [Loss("worker1", (0, 2))]
    assert activity.view().rerun == 2
    assert activity.workers()["worker1"] == WorkerShare(1, 0.1, times_behind=1, is_lost=True)
    run_part(activity, 1, 0, "worker0", 0.1)
    run_part(activity, 1, 2, "worker0", 0.1)
    assert activity.view().maps[0].ended == 2


def test_each_map_that_loses_parts_says_so(activity: Activity) -> None:
    activity.begun(1, "outer", 3, WORKERS)
    activity.begun(2, "inner", 3, WORKERS)
    activity.begun(3, "inner", 3, WORKERS)
    activity.lost(1, "worker1", [2])
    activity.lost(2, "worker1", [0])
    activity.lost(3, "worker1", [])
    assert activity.take_news() == [Loss("worker1", (2,)), Loss("worker1", (0,))]


def test_maps_that_begin_after_a_loss_do_not_tell_it_again(activity: Activity) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    activity.lost(1, "worker1", [])
    assert activity.take_news() == [Loss("worker1", ())]
    activity.done(1, None)
    activity.begun(2, "inner", 3, WORKERS)
    activity.lost(2, "worker1", [1, 2])
    assert activity.take_news() == []
    assert activity.view().rerun == 2


def test_a_worker_that_has_come_back_can_be_lost_again(activity: Activity) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    activity.lost(1, "worker1", [0])
    activity.begun(2, "inner", 3, WORKERS)
    run_part(activity, 2, 0, "worker1", 0.1)
    assert not activity.workers()["worker1"].is_lost
    activity.take_news()
    activity.begun(3, "inner", 3, WORKERS)
    activity.lost(3, "worker1", [0])
    assert activity.take_news() == [Loss("worker1", (0,))]


def test_events_that_overtake_one_another(activity: Activity, clock: Clock) -> None:
    activity.begun(1, "inner", 3, WORKERS)
    activity.ended(1, 0, "worker0", 0.1)
    activity.started(1, 0, "worker0")  # after its end
    activity.lost(1, "worker1", [1])
    activity.ended(1, 1, "worker1", 0.1)  # after its loss
    clock.now = 9.0
    [seen] = activity.view().maps
    assert (seen.ended, sum(seen.running.values())) == (1, 0)
    assert activity.stragglers() == ()
    assert activity.view().parts == 1


def test_events_of_maps_that_began_earlier_are_left_out(activity: Activity) -> None:
    run_part(activity, 1, 0, "worker0", 0.1)
    activity.lost(1, "worker0", [0])
    activity.done(1, None)
    assert activity.view().maps == ()
    assert activity.workers() == {}


def test_what_a_failed_map_left_behind_runs_no_more(activity: Activity, clock: Clock) -> None:
    activity.begun(1, "inner", 2, WORKERS)
    run_part(activity, 1, 0, "worker0", 0.1)
    activity.started(1, 1, "worker1")
    activity.done(1, ValueError("x"))
    clock.now = 9.0
    assert activity.stragglers() == ()
    assert activity.view().maps[0].running == {"worker0": 0, "worker1": 0}


def test_many_threads_at_once(activity: Activity) -> None:
    def run_map(map_id: int) -> None:
        activity.begun(map_id, "inner", 50, WORKERS)
        for part in range(50):
            run_part(activity, map_id, part, WORKERS[part % 2], 2.0)
            activity.view()
        activity.done(map_id, None)

    threads = [threading.Thread(target=run_map, args=(map_id,)) for map_id in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert activity.workers() == {worker: WorkerShare(200, 400.0) for worker in WORKERS}
    assert activity.view().maps_begun == 8
