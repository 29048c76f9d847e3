from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.reports import STEPS, bucket_of, percentile, since, sum_of, time_of

times = st.dictionaries(st.integers(-100, 100).map(str), st.integers(1, 1000), max_size=8)


@given(st.floats(1e-7, 1e6))
def test_a_bucket_is_as_narrow_as_promised(time_s: float) -> None:
    assert time_of(bucket_of(time_s)) == pytest.approx(time_s, rel=2 ** (0.5 / STEPS) - 1 + 1e-9)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50), st.sampled_from((0.5, 0.99)))
def test_a_percentile_is_that_of_the_sorted_times(taken: list[float], share: float) -> None:
    histogram: dict[str, int] = {}
    for time_s in taken:
        bucket = str(bucket_of(time_s))
        histogram[bucket] = histogram.get(bucket, 0) + 1
    exact = sorted(taken)[math.ceil(share * len(taken)) - 1]
    assert percentile(histogram, share) == pytest.approx(exact, rel=0.045)


def test_no_call_has_no_percentile() -> None:
    assert math.isnan(percentile({}, 0.5))


@given(times, times)
def test_later_calls_are_the_sum_without_the_earlier_ones(
    before: dict[str, int], later: dict[str, int]
) -> None:
    assert since(sum_of(before, later), before) == later


def test_a_worker_that_began_anew_has_only_later_calls() -> None:
    assert since({"3": 2}, {"3": 5}) == {"3": 2}
    assert since({"3": 2}, {"4": 1}) == {"3": 2}
