"""Tests which clusters there can be, and what they answer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torchweft.pipeline.partition import Cluster, PartitionError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0), "has 0 workers"),
        ((1, 0.0), "bandwidth is 0.0 bytes/s; it must exceed 0"),
        ((1, math.nan), "bandwidth is nan"),
        ((2, 1.0, -1), "a worker has a memory limit of -1 bytes"),
        ((2, 1.0, None, 2), "workers_per_host=2 and host_bandwidth=None: give both"),
        ((2, 1.0, None, None, 1.0), "workers_per_host=None and host_bandwidth=1.0: give both"),
        ((2, 1.0, None, 0, 1.0), "workers_per_host=0 must be 1 or more"),
        ((2, 1.0, None, 1, 2.0), "host_bandwidth=2.0 bytes/s must .* be at most .* 1.0"),
        ((2, 1.0, None, 1, 0.0), "host_bandwidth=0.0 bytes/s must exceed 0"),
    ],
)
def test_mistakes_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Cluster(*arguments)


def test_the_slowest_link_counts() -> None:
    cluster = Cluster(5, 8.0, workers_per_host=2, host_bandwidth=2.0)
    assert cluster.bandwidth_among(range(2, 4)) == 8.0
    assert cluster.bandwidth_among(range(1, 3)) == 2.0
    assert cluster.bandwidth_among(range(4, 5)) == 8.0
    assert Cluster(3, math.inf).bandwidth_among(range(3)) == math.inf
    assert (Cluster(3, 1.0).limit, Cluster(3, 1.0, 7).limit) == (math.inf, 7)
