from __future__ import annotations

import pytest

from torchweft.errors import ConfigurationError
from torchweft.rpc.batching import BatchStatistics, count_batch


def counted(*batches: list[float]) -> BatchStatistics:
    found = BatchStatistics()
    for waits_s in batches:
        count_batch(found, waits_s)
    return found


def test_percentiles_of_sizes() -> None:
    found = counted(*[[0.0]] * 6, *[[0.0] * 4] * 3, [0.0] * 9)
    assert [found.size_percentile(each) for each in (0, 50, 60, 61, 90, 91, 100)] == [
        1,
        1,
        1,
        4,
        4,
        9,
        9,
    ]


def test_percentiles_of_waits_are_too_long_by_a_quarter_at_most() -> None:
    waits_s = [1e-6 * 1.1**number for number in range(100)]
    found = counted(*[[each] for each in waits_s])
    assert len(found.waits) < 70
    for percent in (1, 20, 50, 99):
        exact = waits_s[percent - 1]
        assert exact <= found.wait_percentile_s(percent) < 1.25 * exact
    assert found.wait_percentile_s(100) == found.longest_wait_s == waits_s[-1]


def test_before_the_first_batch_and_without_waiting() -> None:
    assert counted().size_percentile(50) == 0
    assert counted().wait_percentile_s(99) == 0.0
    assert counted([0.0, 0.0]).wait_percentile_s(99) == 0.0


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_percentage_that_makes_no_sense(percent: float) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to 100"):
        counted([0.0]).size_percentile(percent)
