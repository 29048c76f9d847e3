"""Runs the short form of every question and prints one table; ``--help`` lists the options."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.frame.question import Question
from benchmarks.frame.report import mean_lines, provenance
from benchmarks.frame.run import end_on_sigterm, measured_placements, parse_options, save
from benchmarks.frame.summary import HEAD, aligned, summary

HERE = Path(__file__).parent


def main() -> int:
    """Measures the chosen questions; returns 1 if a side failed."""
    end_on_sigterm()
    found = questions()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(found))
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.questions) - set(found):
        parser.error(f"no question is called {', '.join(unknown)}; there are {', '.join(found)}")
    begin = time.monotonic()
    lines, remarks, failures = [*HEAD], [""], ["- the run was interrupted"]
    try:
        for name in arguments.questions or possible(found):
            _measure(found[name], lines, remarks, failures)
        del failures[0]
    finally:  # an interrupted run prints its results so far
        report = _report([*aligned(lines), *remarks], failures, time.monotonic() - begin)
        print(report)
    if arguments.save:
        save(report, HERE, arguments.save)
    return 1 if failures else 0


def _measure(question: Question, lines: list[str], remarks: list[str], failures: list[str]) -> None:
    begin = time.monotonic()
    options = parse_options(question, ["--short"])
    for placement, rounds in measured_placements(question, options):
        lines += summary(question, placement, rounds)
        remarks += [f"{line} ({question.name})" for line in mean_lines(question, rounds)]
    failures += [f"- failed: {failure}" for failure in options.failures]
    print(f"{question.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def questions() -> dict[str, Question]:
    """Returns the question of each folder that has one, by name."""
    folders = sorted(path.parent.name for path in HERE.glob("*/question.py"))
    modules = [(name, f"benchmarks.{name}.question") for name in folders if name != "frame"]
    return {name: importlib.import_module(module).QUESTION for name, module in modules}


def possible(found: Mapping[str, Question]) -> list[str]:
    """Returns the names of those questions that this machine can answer; reports the others."""
    for name, question in found.items():
        if not question.is_possible():
            print(f"skipping {name}: this machine lacks what it needs", file=sys.stderr)
    return [name for name, question in found.items() if question.is_possible()]


def _report(lines: list[str], failures: list[str], elapsed_s: float) -> str:
    head = [
        "# Weft beside torch.distributed.rpc and the machine's limit",
        "",
        f"{provenance()} The run took {elapsed_s:.0f} s; sides alternate, ratios are medians of "
        "the ratios of single rounds.",
        "",
    ]
    return "\n".join([*head, *lines, "", *failures]).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
