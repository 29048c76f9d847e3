from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.reports import STEPS, bucket_of, percentile, since, time_of


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


def test_a_worker_that_began_anew_has_only_later_calls() -> None:
    assert since({"3": 2}, {"3": 5}) == {"3": 2}
    assert since({"3": 2}, {"4": 1}) == {"3": 2}
