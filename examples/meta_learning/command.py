"""Parses the command line."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from learning import TESTED_TASKS, Schedule


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        problem: The tasks to learn, ``sinusoid`` or ``digits``.
        workers: Worker processes to start; 0 for none.
        schedule: The training schedule.
        double: Whether to compute in ``float64``.
        out: Folder for the picture and the figures; None for one named after the time.
    """

    problem: str
    workers: int
    schedule: Schedule
    double: bool
    out: Path | None


ITERATIONS = {"sinusoid": 3000, "digits": 400}
TASKS = {"sinusoid": 25, "digits": 16}


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without listing all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parses the command line; exits with status 2 if it is invalid."""
    parser = OneLineParser(prog="train.py", description="Learns to learn (MAML), over workers.")
    add = parser.add_argument
    add("problem", choices=list(ITERATIONS), help="waves from ten points, or digits by class")
    _add_number(parser, "--workers", 0, 2, "worker processes; 0: all in this one")
    _add_number(parser, "--iterations", 1, None, f"meta-steps ({_defaults(ITERATIONS)})")
    _add_number(parser, "--tasks", 1, None, f"tasks in a meta-step ({_defaults(TASKS)})")
    _add_number(parser, "--seed", 0, 0, "where random numbers start")
    _add_number(parser, "--held-out", 1, TESTED_TASKS, "tasks to test with")
    add("--first-order", action="store_true", help="leave out second derivatives")
    add("--one-by-one", action="store_true", help="make each task a part of its own")
    add("--double", action="store_true", help="compute in float64")
    add("--out", type=Path, metavar="DIR", help="folder for the results (default: runs/TIME)")
    given = parser.parse_args(arguments)
    schedule = Schedule(
        iterations=given.iterations or ITERATIONS[given.problem],
        tasks=given.tasks or TASKS[given.problem],
        first_order=given.first_order,
        one_by_one=given.one_by_one,
        seed=given.seed,
        held_out=given.held_out,
    )
    return Options(given.problem, given.workers, schedule, given.double, given.out)


def whole_number(least: int) -> Callable[[str], int]:
    """Returns a function that parses whole numbers from ``least`` up."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")

    return read


def _add_number(
    parser: argparse.ArgumentParser, option: str, least: int, usual: int | None, text: str
) -> None:
    if usual is not None:
        text += f" (default: {usual})"
    parser.add_argument(option, type=whole_number(least), default=usual, metavar="N", help=text)


def _defaults(usual: dict[str, int]) -> str:
    return "default: " + ", ".join(f"{number:,} for {name}" for name, number in usual.items())
