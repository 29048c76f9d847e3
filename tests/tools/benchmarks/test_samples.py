from __future__ import annotations

import gc

import pytest

from benchmarks.endurance.samples import KINDS, Course, Kind, count_types, take_sample

COUNTED = Kind("", 1, 2)


@pytest.mark.parametrize(
    ("values", "growth"),
    [
        ([1, 50, 100, 100, 100, 100, 100, 100], 0),  # growth during warm-up is allowed
        ([10, 20, 30, 40, 50, 60, 70, 80], 40),
        ([10, 10, 14, 10, 10, 10, 14, 10], 0),  # values that go up and down are flat
        ([10, 10, 10, 10, 10, 10, 10, 13], 3),
        ([10, 10, 10, 10, 10, 10, 5, 5], -5),
    ],
)
def test_last_quarter_is_compared_with_the_second(values: list[float], growth: float) -> None:
    course = Course(COUNTED, values)
    assert course.growth == growth
    assert course.is_flat == (growth <= COUNTED.slack)
    assert course.cells()[-1] == ("flat" if growth <= COUNTED.slack else "GROWS")


def test_growth_up_to_a_bound_is_flat() -> None:
    threads = Kind("", 1, 0, bound=21)
    assert Course(threads, [5, 5, 5, 5, 6, 7, 9, 21]).is_flat
    assert not Course(threads, [5, 5, 5, 5, 6, 7, 9, 22]).is_flat


def test_of_times_the_lowest_values_are_compared() -> None:
    time = Kind("ms", 1, 2, is_time=True)
    assert Course(time, [5, 5, 5, 6, 5, 5, 5, 90]).is_flat
    assert not Course(time, [5, 5, 5, 6, 6, 7, 8, 90]).is_flat


def test_sample_tells_every_kind() -> None:
    sample = take_sample()
    assert set(sample) == set(KINDS)
    assert sample["memory (resident, trimmed)"] >= sample["shared memory"]
    assert sample["threads"] >= 1
    assert sample["descriptors"] >= 3


class Kept:
    """An object that a test keeps alive."""


def test_objects_are_counted_by_type() -> None:
    name = f"{Kept.__module__}.{Kept.__qualname__}"
    kept = [Kept() for _ in range(5)]
    assert count_types()[name] == 5
    kept.clear()
    gc.collect()
    assert count_types()[name] == 0
