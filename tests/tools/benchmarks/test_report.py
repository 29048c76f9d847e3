from __future__ import annotations

import pytest

from benchmarks.frame import (
    GIGABYTES_PER_S,
    PERCENT,
    Question,
    Row,
    Target,
    at_least_of_limit,
    at_most,
    at_most_times_limit,
    no_slower,
    times_faster,
)
from benchmarks.frame.figures import Round
from benchmarks.frame.report import table, to_limit, to_torch, verdict_on, verdicts
from benchmarks.frame.summary import HEAD, aligned, summary

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


@pytest.mark.parametrize(("value", "is_met"), [(0.004, True), (0.02, False)])
def test_absolute_verdict(value: float, is_met: bool) -> None:
    row = Row("idle", "idle CPU", unit=PERCENT)
    verdict = verdict_on(row, at_most(0.01, "1 %"), {("weft", "idle"): [Round([value])]})
    assert verdict is not None
    assert (verdict.shown, verdict.is_met) == (f"{value * 100:.1g} %", is_met)


def test_no_verdict_on_what_was_not_measured() -> None:
    ours_only = {("weft", "call"): ROUNDS["weft", "call"]}
    row = Row("call", "a call", targets=(times_faster(6), at_most_times_limit(5)))
    assert verdict_on(row, row.targets[0], {}) is None
    assert list(verdicts(Question("benchmarks.x", "X", (row,)), ours_only)) == []


def test_limit_is_compared_by_time_or_by_rate() -> None:
    assert to_limit(Row("call", "a call"), ROUNDS) == "4x"
    rate = Row("call", "a call", unit=GIGABYTES_PER_S, amount=1e6)
    assert to_limit(rate, ROUNDS) == "0.25x"
    assert to_torch(rate, ROUNDS) == "6x (6-6)"


def test_row_names_the_sides_that_it_compares() -> None:
    row = Row("call", "a call", ours="raw", torch="weft", limit="torch")
    assert to_torch(row, ROUNDS) == "4x (4-4)"
    assert to_limit(row, ROUNDS) == "0.042x"


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


def test_aligned_columns_begin_at_the_same_place() -> None:
    question = Question("benchmarks.x", "X", (Row("call", "a call"),))
    lines = aligned([*HEAD, *summary(question, "one core", ROUNDS)])
    bars = [[at for at, character in enumerate(line) if character == "|"] for line in lines]
    assert bars[0] == bars[1] == bars[2]
