from __future__ import annotations

import pytest

from benchmarks.frame import (
    Row,
    Target,
    at_least_of_limit,
    at_most_times_limit,
    no_slower,
    times_faster,
)
from benchmarks.frame.figures import Round
from benchmarks.frame.report import verdict_on

ROUNDS = {
    ("torch", "call"): [Round([600e-6], 800e-6)],
    ("weft", "call"): [Round([100e-6], 400e-6)],
    ("raw", "call"): [Round([25e-6], 25e-6)],
}


@pytest.mark.parametrize(
    ("target", "shown", "is_met"),
    [
        (times_faster(5.9), "6x (6-6)", True),
        (times_faster(6.1), "6x (6-6)", False),
        (times_faster(4, "cpu"), "2x (2-2)", False),
        (no_slower(), "6x (6-6)", True),
        (at_most_times_limit(5), "4x (4-4)", True),
        (at_most_times_limit(3), "4x (4-4)", False),
        (at_least_of_limit(0.8), "0.25x (0.25-0.25)", False),
        (at_least_of_limit(0.2), "0.25x (0.25-0.25)", True),
    ],
    ids=lambda value: value.text if isinstance(value, Target) else None,
)
def test_verdict(target: Target, shown: str, is_met: bool) -> None:
    verdict = verdict_on(Row("call", "a call"), target, ROUNDS)
    assert verdict is not None
    assert (verdict.shown, verdict.is_met) == (shown, is_met)
