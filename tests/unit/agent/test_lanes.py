"""The queue of tasks: turns, bounds, and many threads at once."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from torchweft.agent.lanes import OWN, SWEEP_LIMIT, Lanes


def nothing(*_: Any) -> None:
    """Is what the tasks call; they are told apart by their argument."""


def make(limit: int = 10, limit_bytes: int = 1000) -> Lanes:
    return Lanes(limit, limit_bytes)


def drain(lanes: Lanes) -> list[Any]:
    taken = []
    while lanes.turns:
        taken.append(lanes.popleft()[1])
    return taken


def test_one_lane_keeps_its_order() -> None:
    lanes = make()
    for number in range(5):
        lanes.append((nothing, number, None), 1)
    assert len(lanes) == 5
    assert drain(lanes) == [0, 1, 2, 3, 4]
    assert len(lanes) == 0


def test_lanes_take_turns() -> None:
    lanes = make()
    for number in range(4):
        lanes.append((nothing, f"flood {number}", None), 1)
    lanes.append((nothing, "single", None), 2)
    lanes.append((nothing, "own", None))
    assert drain(lanes) == ["flood 0", "single", "own", "flood 1", "flood 2", "flood 3"]


def test_a_lane_that_was_empty_goes_to_the_end_of_the_turns() -> None:
    lanes = make()
    lanes.append((nothing, "a", None), 1)
    lanes.append((nothing, "b", None), 2)
    assert lanes.popleft()[1] == "a"
    lanes.append((nothing, "c", None), 1)
    assert drain(lanes) == ["b", "c"]


def test_nothing_to_take_is_an_index_error() -> None:
    lanes = make()
    with pytest.raises(IndexError):
        lanes.popleft()
    lanes.append((nothing, 1, None), 3)
    lanes.popleft()
    with pytest.raises(IndexError):
        lanes.popleft()


def test_a_full_lane_refuses_what_is_offered_and_the_others_do_not() -> None:
    lanes = make(limit=2)
    assert [lanes.offer((nothing, number, None), 1, 0) for number in range(3)] == [
        True,
        True,
        False,
    ]
    assert lanes.offer((nothing, "other", None), 2, 0)
    lanes.append((nothing, "must", None), 1)
    assert drain(lanes) == [0, "other", 1, "must"]
    assert lanes.offer((nothing, 4, None), 1, 0)


def test_bytes_are_bounded_as_well() -> None:
    lanes = make(limit_bytes=100)
    assert lanes.offer((nothing, "large", None), 1, 500)
    assert not lanes.offer((nothing, "small", None), 1, 1)
    lanes.popleft()
    assert lanes.offer((nothing, "small", None), 1, 60)
    assert lanes.offer((nothing, "small", None), 1, 40)
    assert not lanes.offer((nothing, "small", None), 1, 1)


def test_lanes_of_workers_that_have_left_do_not_pile_up() -> None:
    lanes = make()
    for life in range(20 * SWEEP_LIMIT):
        assert lanes.offer((nothing, life, None), life, 1)
        assert lanes.popleft()[1] == life
        assert len(lanes._lanes) <= SWEEP_LIMIT
    assert not lanes.turns


def test_a_lane_that_finalizers_use_is_never_dropped() -> None:
    lanes = Lanes(10, 1000, kept=frozenset({OWN, 0}))
    for lane in (OWN, 0):
        lanes.append((nothing, lane, None), lane)
    drain(lanes)
    kept = [lanes._lanes[lane] for lane in (OWN, 0)]
    for life in range(1, 4 * SWEEP_LIMIT):
        lanes.append((nothing, life, None), life)
        lanes.popleft()
    assert [lanes._lanes[lane] for lane in (OWN, 0)] == kept


def test_a_lane_in_which_tasks_wait_is_kept_with_its_bounds() -> None:
    lanes = make(limit=2, limit_bytes=100)
    waiting = range(2 * SWEEP_LIMIT)
    for worker in waiting:
        assert lanes.offer((nothing, worker, None), worker, 60)
    for life in range(10_000, 10_000 + 4 * SWEEP_LIMIT):
        lanes.append((nothing, life, None), life)
    assert not lanes.offer((nothing, "too large", None), 0, 60)
    assert lanes.offer((nothing, "second", None), 0, 40)
    assert not lanes.offer((nothing, "third", None), 0, 0)
    taken = drain(lanes)
    assert taken[: len(waiting)] == list(waiting)
    assert taken[-1] == "second"
    assert len(taken) == len(waiting) + 4 * SWEEP_LIMIT + 1


def test_many_threads_lose_and_double_nothing() -> None:
    lanes = make(limit=100_000)
    taken: list[list[Any]] = [[] for _ in range(3)]
    are_putting = threading.Event()

    def put(lane: int) -> None:
        for number in range(3000):
            lanes.append((nothing, (lane, number), None), lane)

    def take(into: list[Any]) -> None:
        while not are_putting.is_set() or lanes.turns:
            try:
                into.append(lanes.popleft()[1])
            except IndexError:
                continue

    takers = [threading.Thread(target=take, args=(into,)) for into in taken]
    putters = [threading.Thread(target=put, args=(lane,)) for lane in (OWN, 1, 2)]
    for thread in takers + putters:
        thread.start()
    for thread in putters:
        thread.join()
    are_putting.set()
    for thread in takers:
        thread.join()
    everything = Counter(item for into in taken for item in into)
    assert everything == Counter((lane, number) for lane in (OWN, 1, 2) for number in range(3000))
    for into in taken:
        for lane in (OWN, 1, 2):
            numbers = [number for of, number in into if of == lane]
            assert numbers == sorted(numbers)
