from __future__ import annotations

import pytest

from benchmarks.frame import (
    Question,
    Row,
    Target,
    at_least_of_limit,
    at_most_times_limit,
    no_slower,
    times_faster,
)
from benchmarks.frame.figures import Round
from benchmarks.frame.report import table, verdict_on
from benchmarks.frame.summary import summary

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


def test_table_has_a_line_for_each_side_and_the_ratios_at_ours() -> None:
    lines = table(Question("benchmarks.x", "X", (Row("call", "a call"),)), ROUNDS)
    assert lines[2:] == [
        "| a call | torch | 600 us |  | 1,667 | 800 us |  |  |",
        "| a call | weft | 100 us |  | 10,000 | 400 us | 6x (6-6) | 4x |",
        "| a call | raw | 25 us |  | 40,000 | 25 us |  |  |",
    ]


def test_summary_has_a_line_for_each_target() -> None:
    targets = (times_faster(5), times_faster(4, "cpu"), times_faster(2, "p99"))
    question = Question("benchmarks.x", "X", (Row("call", "a call", targets=targets),))
    lines = [
        [cell.strip() for cell in line.split("|")[2:-1]]
        for line in summary(question, "one core", ROUNDS)
    ]
    faster, less, p99 = (target.text for target in targets)
    six, two = "6x (6-6)", "2x (2-2)"
    assert lines == [
        ["a call", "one core", "100 us", "600 us", "25 us", six, "4x", faster, "met"],
        ["a call: CPU", "one core", "400 us", "800 us", "25 us", two, "16x", less, "MISSED"],
        ["a call: p99", "one core", "", "", "", "", "", p99, "not measured"],
    ]
