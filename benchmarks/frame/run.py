"""Runs one question: options, measurement in each placement, report."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame.figures import Rounds
from benchmarks.frame.group import ROOT
from benchmarks.frame.measuring import measure
from benchmarks.frame.placement import placements
from benchmarks.frame.question import Question
from benchmarks.frame.report import mean_lines, provenance, table, verdicts


def main(question: Question, arguments: Sequence[str] | None = None) -> int:
    """Runs a question's program: measures, prints the report, and saves it on request."""
    end_on_sigterm()
    options = parse_options(question, arguments)
    lines = [f"# {question.title}", "", provenance(), question.about]
    lines.append(f"{options.rounds} rounds, times {options.scale:g} operations.")
    for placement, rounds in measured_placements(question, options):
        found = [verdict.line() for verdict in verdicts(question, rounds)]
        lines += ["", f"## {placement}", "", *table(question, rounds)]
        found += mean_lines(question, rounds)
        lines += ["", *found] if found else []
    lines += ["", *(f"- failed: {failure}" for failure in options.failures)]
    report = "\n".join(lines).rstrip() + "\n"
    print(report)
    if options.save:
        save(report, ROOT / question.folder.replace(".", os.sep), options.save)
    return 1 if options.failures else 0


def measured_placements(
    question: Question, options: argparse.Namespace
) -> list[tuple[str, Rounds]]:
    """Measures each chosen placement that this machine allows."""
    measured = []
    for name, cores in placements().items():
        if name in options.placements:
            print(f"measuring {question.name}: {name}", file=sys.stderr, flush=True)
            measured.append((name, measure(question, options, cores)))
    return measured


def parse_options(question: Question, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; the question's full or short form sets the defaults."""
    sides = {side.name: side for side in question.sides}
    rows = {row.name: row for row in question.rows}
    usual = [side.name for side in question.sides if side.is_default]
    listed = [f"  {name!r}" for name in rows]
    parser = argparse.ArgumentParser(
        prog=f"python -m {question.folder}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["works:", *listed]),
    )
    parser.add_argument("--short", action="store_true", help="fewer works and rounds")
    told = f"of {', '.join(map(repr, sides))}"
    parser.add_argument(
        "--sides", nargs="+", choices=list(sides), metavar="SIDE", default=usual, help=told
    )
    parser.add_argument(
        "--works",
        nargs="+",
        choices=list(rows),
        metavar="WORK",
        help="of those below; default: all",
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--scale", type=float, help="times the operations of a round")
    parser.add_argument("--placement", nargs="+", choices=list(placements()), dest="placements")
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    options = parser.parse_args(arguments)
    form = question.short if options.short else question.full
    chosen = options.works or [
        name for name, row in rows.items() if row.is_short or not options.short
    ]
    options.rows = [rows[name] for name in chosen]
    options.sides = [sides[name] for name in options.sides]
    options.rounds = options.rounds or form.rounds
    options.scale = options.scale or form.scale
    options.placements = options.placements or usable(form.placements)
    options.failures = []
    return options


def usable(wanted: Sequence[str]) -> list[str]:
    """Returns the wanted placements that this machine allows, or all placements if none is."""
    known = list(placements())
    return [name for name in wanted if name in known] or known


def save(report: str, folder: Path, name: str) -> None:
    """Writes a report into the results of a folder."""
    target = folder / "results" / f"{datetime.date.today().isoformat()}-{name}.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(report)
    print(f"saved as {os.path.relpath(target)}", file=sys.stderr)


def end_on_sigterm() -> None:
    """Makes SIGTERM unwind the stack like Ctrl-C, so that no stopped process is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
