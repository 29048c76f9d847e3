from __future__ import annotations

import pytest

from torchweft.errors import ConfigurationError
from torchweft.rpc.batching import BatchStatistics, count_batch


def counted(*batches: list[float]) -> BatchStatistics:
    found = BatchStatistics()
    for waits_s in batches:
        count_batch(found, waits_s)
    return found


def test_before_the_first_batch_and_without_waiting() -> None:
    assert counted().size_percentile(50) == 0
    assert counted().wait_percentile_s(99) == 0.0
    assert counted([0.0, 0.0]).wait_percentile_s(99) == 0.0


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_percentage_that_makes_no_sense(percent: float) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to 100"):
        counted([0.0]).size_percentile(percent)
