from __future__ import annotations

import pytest

from benchmarks.endurance.samples import Course, Kind

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
