"""Measures two processes on one GPU; see the README beside this file.

Beside the options of every question there are ``--device cpu``, which tries the programs without a
GPU, and ``--out DIR``, which writes all figures as JSON and as CSV.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame.figures import Rounds, figures_of
from benchmarks.frame.measuring import measure
from benchmarks.frame.placement import placements
from benchmarks.frame.question import Question
from benchmarks.frame.report import provenance, table
from benchmarks.frame.run import end_on_sigterm, parse_options
from benchmarks.frame.summary import aligned
from benchmarks.gpu.question import GPU, THROUGH_HOST, question
from benchmarks.machine import describe_machine

PLACEMENT = "not pinned"
"""Drivers and libraries of a GPU have threads of their own, which need cores as well."""


def main() -> int:
    """Measures, prints a table, and writes the figures; returns 1 if a side failed."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", add_help=False)
    parser.add_argument("--device", default=GPU)
    parser.add_argument("--out", type=Path, metavar="DIR")
    own, rest = parser.parse_known_args()
    os.environ["BENCHMARK_DEVICE"] = own.device
    asked = question(own.device)
    options = parse_options(asked, rest)
    if "--sides" not in rest and own.device != "cpu":
        options.sides.append(THROUGH_HOST)
    rounds = measure(asked, options, placements()[PLACEMENT])
    print(f"# {asked.title}\n\n{provenance()} {asked.about}\n")
    print("\n".join(aligned(table(asked, rounds))))
    for failure in options.failures:
        print(f"- failed: {failure}")
    if own.out is not None:
        write(own.out, asked, rounds, options.failures)
    return 1 if options.failures else 0


def write(folder: Path, asked: Question, rounds: Rounds, failures: Sequence[str]) -> None:
    """Writes ``gpu.json``, with all measured times, and ``gpu.csv``, with their figures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*_lines(asked, rounds)]
    times = [
        {"row": row, "side": side, "seconds": [one.values for one in measured]}
        for (side, row), measured in rounds.items()
    ]
    content = {
        "machine": describe_machine(),
        "failures": list(failures),
        "figures": lines,
        "rounds": times,
    }
    (folder / "gpu.json").write_text(json.dumps(content, indent=1))
    with (folder / "gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]) if lines else [])
        writer.writeheader()
        writer.writerows(lines)


def _lines(asked: Question, rounds: Rounds) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for row in asked.rows:
        for side in asked.sides:
            measured = rounds.get((side.name, row.name))
            if measured:
                figures = figures_of(measured)
                rate = row.unit.shown(figures.median, row.amount) if row.unit.is_rate else ""
                found.append(
                    {
                        "row": row.name,
                        "side": side.name,
                        "median_s": figures.median,
                        "p99_s": figures.p99 or "",
                        "cpu_s": figures.cpu or "",
                        "gb_per_s": rate,
                    }
                )
    return found


if __name__ == "__main__":
    sys.exit(main())
