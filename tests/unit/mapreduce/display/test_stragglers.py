"""Who is behind."""

from __future__ import annotations

from torchweft.mapreduce.display.stragglers import REMEMBERED, Durations, Straggler


def durations_of(*seconds: float) -> Durations:
    durations = Durations()
    for one in seconds:
        durations.add("inner", one)
    return durations


def test_a_part_is_behind_after_three_medians() -> None:
    durations = durations_of(0.4, 0.5, 2.0)
    assert durations.judge("worker2", 7, "inner", 1.5) is None
    assert durations.judge("worker2", 7, "inner", 1.6) == Straggler("worker2", 7, "inner", 1.6, 0.5)


def test_no_part_is_behind_within_a_second() -> None:
    durations = durations_of(0.001)
    assert durations.judge("worker2", 7, "inner", 1.0) is None
    assert durations.judge("worker2", 7, "inner", 1.01) is not None


def test_there_is_nothing_to_compare_with_at_first() -> None:
    durations = durations_of(0.001)
    assert durations.judge("worker2", 7, "outer", 1000.0) is None


def test_what_is_long_ago_is_forgotten() -> None:
    durations = durations_of(*[0.001] * 1000, *[5.0] * REMEMBERED)
    assert durations.judge("worker2", 7, "inner", 14.0) is None
