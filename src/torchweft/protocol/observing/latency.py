"""Histograms of times whose buckets grow by a constant factor, 2^(1/8): 8 for each doubling.

So one histogram covers microseconds and hours, and a percentile is off by 4.4 % at most. A bucket
is named by its number, as text, since histograms travel as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

STEPS = 8
"""Buckets for each doubling."""
LEAST_S = 1e-7
"""Shorter times count as this."""

Times = Mapping[str, int]


def bucket_of(time_s: float) -> int:
    """Returns the number of the bucket of a time."""
    return math.floor(math.log2(max(time_s, LEAST_S)) * STEPS)


def time_of(bucket: int) -> float:
    """Returns the time in the middle of a bucket, in seconds."""
    return float(2.0 ** ((bucket + 0.5) / STEPS))


def percentile(times: Times, share: float) -> float:
    """Returns the time that ``share`` of all calls did not exceed; NaN if there are none."""
    left = share * sum(times.values())
    for bucket, count in sorted((int(bucket), count) for bucket, count in times.items()):
        left -= count
        if count and left <= 0:
            return time_of(bucket)
    return math.nan


def since(now: Times, before: Times) -> dict[str, int]:
    """Returns the calls of ``now`` that are not in ``before``; all if ``before`` has others."""
    grown = {bucket: count - before.get(bucket, 0) for bucket, count in now.items()}
    is_later = all(count >= 0 for count in grown.values()) and before.keys() <= now.keys()
    return {bucket: count for bucket, count in (grown if is_later else dict(now)).items() if count}


def sum_of(*all_times: Times) -> dict[str, int]:
    """Returns the calls of all histograms together."""
    total: dict[str, int] = {}
    for times in all_times:
        for bucket, count in times.items():
            total[bucket] = total.get(bucket, 0) + count
    return total
