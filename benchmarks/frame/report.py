"""The report of one question in Markdown: all figures, and the verdicts on its targets."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.frame.figures import FigureName, Rounds, figures_of, ratio_of
from benchmarks.frame.question import Question, Row
from benchmarks.frame.targets import Target
from benchmarks.frame.units import MICROSECONDS, Unit, number
from benchmarks.machine import describe_machine, load_of_others


@dataclass(frozen=True)
class Verdict:
    """Whether the rounds meet one target of a row."""

    row: Row
    target: Target
    shown: str
    is_met: bool

    def line(self) -> str:
        mark = "met" if self.is_met else "missed"
        return f"- {mark}: {self.row.title}: {self.shown} (target: {self.target.text})"


def provenance() -> str:
    """Returns the date, the machine and its load."""
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    return (
        f"{datetime.date.today().isoformat()}; {machine}; {load_of_others()} threads of other "
        "programs were running at the start."
    )


def table(question: Question, rounds: Rounds) -> list[str]:
    """Returns a table with one line for each row and side."""
    lines = [
        "| what | side | median | p99 | a second | CPU | to torch (worst-best round) | to limit |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for row in question.rows:
        for side in question.sides:
            if rounds.get((side.name, row.name)):
                lines.append(_line(row, side.name, rounds))
    return lines


def _line(row: Row, side: str, rounds: Rounds) -> str:
    figures = figures_of(rounds[side, row.name])
    median = row.unit.text(figures.median, row.amount)
    p99 = "" if figures.p99 is None else row.unit.text(figures.p99, row.amount)
    rate = f"{1 / figures.median:,.0f}" if row.unit is MICROSECONDS else ""
    cpu = "" if figures.cpu is None else cpu_unit(row).text(figures.cpu)
    is_ours = side == row.ours
    ours_to_torch = to_torch(row, rounds) if is_ours else ""
    ours_to_limit = to_limit(row, rounds) if is_ours else ""
    return (
        f"| {row.title} | {side} | {median} | {p99} | {rate} | {cpu} | {ours_to_torch} "
        f"| {ours_to_limit} |"
    )


def cpu_unit(row: Row) -> Unit:
    """Returns the unit of the row's CPU time: its own, or microseconds if that is a rate."""
    return MICROSECONDS if row.unit.is_rate else row.unit


def to_torch(row: Row, rounds: Rounds, figure: FigureName = "median") -> str:
    """Returns how many times less ours takes than torch RPC, with the extremes."""
    ratio = ratio_of(
        rounds.get((row.torch, row.name), ()), rounds.get((row.ours, row.name), ()), figure
    )
    if ratio is None:
        return ""
    return f"{number(ratio.median)}x ({number(ratio.worst)}-{number(ratio.best)})"


def to_limit(row: Row, rounds: Rounds, figure: FigureName = "median") -> str:
    """Returns ours as a multiple of the limit: of its rate, or of its time."""
    ratio = ratio_of(
        rounds.get((row.limit, row.name), ()), rounds.get((row.ours, row.name), ()), figure
    )
    if ratio is None:
        return ""
    value = ratio.median if row.unit.is_rate else 1 / ratio.median
    return f"{number(value)}x"


def verdicts(question: Question, rounds: Rounds) -> Iterator[Verdict]:
    """Yields a verdict for each target that was measured."""
    for row in question.rows:
        for target in row.targets:
            verdict = verdict_on(row, target, rounds)
            if verdict is not None:
                yield verdict


def mean_lines(question: Question, rounds: Rounds) -> list[str]:
    """Returns the geometric mean of the ratios to torch RPC, and the five lowest of them."""
    ratios = {}
    for row in question.rows:
        others, ours = rounds.get((row.torch, row.name), ()), rounds.get((row.ours, row.name), ())
        ratio = ratio_of(others, ours)
        if ratio is not None:
            ratios[row] = ratio.median
    if not question.mean or not ratios:
        return []
    mean = statistics.geometric_mean(ratios.values())
    mark = "met" if mean >= question.mean else "missed"
    lowest = sorted(ratios, key=ratios.__getitem__)[:5]
    named = ", ".join(f"{row.title} {number(ratios[row])}x" for row in lowest)
    return [
        f"- {mark}: geometric mean of {len(ratios)} rows: {number(mean)}x "
        f"(target: at least {number(question.mean)}x torch)",
        f"- the five lowest: {named}",
    ]


def verdict_on(row: Row, target: Target, rounds: Rounds) -> Verdict | None:
    """Returns whether the row meets the target, or None if that was not measured."""
    ours = rounds.get((row.ours, row.name))
    if not ours:
        return None
    if target.against == "bound":
        value = figures_of(ours).median
        return Verdict(row, target, row.unit.text(value, row.amount), value <= target.bound)
    other = row.torch if target.against == "torch" else row.limit
    ratio = ratio_of(rounds.get((other, row.name), ()), ours, target.figure)
    if ratio is None:
        return None
    return Verdict(row, target, target.shown(ratio), target.is_met_by(ratio))
