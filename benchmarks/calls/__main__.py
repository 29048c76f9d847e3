"""Runs the comparison and prints one report; see the README beside this file."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.calls.report import Rounds, table, verdicts
from benchmarks.calls.side import Round, started_side
from benchmarks.machine import describe_machine, load_of_others

RESULTS = Path(__file__).parent / "results"
SIDES = ("torch", "weft", "raw")

# Calls of a round: about a tenth of a second for the slower side, a second with 2,000 in flight.
CALLS = {
    "function": 300,
    "operator": 300,
    "reference": 200,
    "in flight 1": 300,
    "in flight 100": 1000,
    "in flight 2000": 4000,
}
WARM_UP_CALLS = 20


def main() -> int:
    """Measures every placement and prints, and on request saves, the report."""
    arguments = parse_arguments()
    lines = ["# Small calls", "", *_heading(arguments)]
    for name, cores in placements().items():
        if arguments.placement in (None, name):
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            rounds = measure(arguments, cores)
            lines += ["", f"## {name}", "", *table(rounds), "", *verdicts(rounds)]
    report = "\n".join(lines) + "\n"
    print(report)
    if arguments.save:
        target = RESULTS / f"{datetime.date.today().isoformat()}-{arguments.save}.md"
        RESULTS.mkdir(exist_ok=True)
        target.write_text(report)
        print(f"saved as {os.path.relpath(target)}", file=sys.stderr)
    return 0


def placements() -> dict[str, tuple[set[int], set[int]]]:
    """Returns the cores of caller and callee for each placement that is measured."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = {"not pinned": (set(cores), set(cores)), "one core": ({cores[0]}, {cores[0]})}
    if len(cores) > 1:
        chosen = {"a core each": ({cores[0]}, {cores[1]}), **chosen}
    return chosen


def measure(arguments: argparse.Namespace, cores: tuple[set[int], set[int]]) -> Rounds:
    """Alternates between the sides, round by round, and returns what each did."""
    rounds: dict[tuple[str, str], list[Round]] = defaultdict(list)
    with contextlib.ExitStack() as running:
        sides = [running.enter_context(started_side(api, cores)) for api in arguments.sides]
        for number in range(arguments.rounds):
            for work in arguments.works:
                calls = int(CALLS[work] * arguments.scale)
                # Who comes first changes, so that nobody always follows the same side.
                for side in sides if number % 2 else reversed(sides):
                    if work in side.works:
                        rounds[side.api, work].append(side.measure(work, calls, WARM_UP_CALLS))
    return rounds


def _heading(arguments: argparse.Namespace) -> list[str]:
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    return [
        f"{datetime.date.today().isoformat()}; {machine}.",
        f"{arguments.rounds} rounds, sides alternating; a tensor of 2 elements; "
        f"{load_of_others()} threads of other programs were running at the start.",
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--works", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="times the calls of a round")
    parser.add_argument("--placement", choices=list(placements()), help="default: all")
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
