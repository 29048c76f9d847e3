"""The table over all questions: ours, torch RPC, the raw limit, the ratios, the targets."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.frame.figures import FigureName, Rounds, figures_of
from benchmarks.frame.question import Question, Row
from benchmarks.frame.report import cpu_unit, to_limit, to_torch, verdict_on
from benchmarks.frame.targets import Target

HEAD = [
    "| question | what | placement | ours | torch | limit | to torch (worst-best) | to limit "
    "| target | |",
    "|---|---|---|---:|---:|---:|---|---|---|---|",
]


def summary(question: Question, placement: str, rounds: Rounds) -> list[str]:
    """Returns the question's lines: one for each target, one for each row without a target."""
    lines = []
    for row in question.rows:
        if rounds.get((row.ours, row.name)):
            targets: Sequence[Target | None] = row.targets or (None,)
            heads = [question.name, placement]
            lines += [_line(heads, row, target, rounds) for target in targets]
    return lines


def aligned(lines: Sequence[str]) -> list[str]:
    """Pads the cells of a Markdown table, so that it can be read in a terminal."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["| " + " | ".join(map(_padded, row, widths)) + " |" for row in rows]


def _padded(cell: str, width: int) -> str:
    if set(cell) <= set("-:") and "-" in cell:  # the line under the head
        return "-" * (width - 1) + cell[-1]
    return cell.ljust(width)


def _line(heads: Sequence[str], row: Row, target: Target | None, rounds: Rounds) -> str:
    figure: FigureName = "median" if target is None else target.figure
    title = row.title if figure == "median" else f"{row.title}: {figure.replace('cpu', 'CPU')}"
    columns = [heads[0], title, heads[1]]
    columns += [_cell(row, side, figure, rounds) for side in (row.ours, row.torch, row.limit)]
    columns += [to_torch(row, rounds, figure), to_limit(row, rounds, figure)]
    columns += ["", ""] if target is None else [target.text, _mark(row, target, rounds)]
    return "| " + " | ".join(columns) + " |"


def _cell(row: Row, side: str, figure: FigureName, rounds: Rounds) -> str:
    measured = rounds.get((side, row.name))
    value = figures_of(measured).named(figure) if measured else None
    if value is None:
        return ""
    return cpu_unit(row).text(value) if figure == "cpu" else row.unit.text(value, row.amount)


def _mark(row: Row, target: Target, rounds: Rounds) -> str:
    verdict = verdict_on(row, target, rounds)
    if verdict is None:
        return "not measured"
    return "met" if verdict.is_met else "MISSED"
