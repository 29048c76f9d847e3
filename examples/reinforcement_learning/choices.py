"""Parses the command line."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        algorithm: ``a2c`` or ``dqn``.
        where: Where observers run: ``process``, ``threads`` or ``workers``.
        observers: How many there are.
        environments: Of each observer.
        steps: Environment steps, after which the training ends.
        until_solved: Whether the training ends as soon as the mean return is reached.
        unroll: Steps of each environment in a trajectory.
        stream: Whether observers go on while the learner learns.
        seed: Seed of the weights, the environments and the actions.
        out: Folder for the results; None for one named after the time.
    """

    algorithm: str
    where: str
    observers: int
    environments: int
    steps: int
    until_solved: bool
    unroll: int
    stream: bool
    seed: int
    out: Path | None


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without listing all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parses the command line; exits with status 2 if it is invalid."""
    parser = OneLineParser(
        prog="train.py", description="Learns to balance a pole, its environments on workers."
    )
    add = parser.add_argument

    def add_number(option: str, least: int, usual: int, text: str) -> None:
        text += f" (default: {usual})"
        add(option, type=whole_number(least), default=usual, metavar="N", help=text)

    text = "the algorithm (default: a2c)"
    add("algorithm", nargs="?", choices=["a2c", "dqn"], default="a2c", help=text)
    text = "where observers run (default: workers)"
    add("--where", choices=["process", "threads", "workers"], default="workers", help=text)
    add_number("--observers", 1, 2, "observers")
    add_number("--environments", 1, 4, "environments of each observer")
    add_number("--steps", 1, 60_000, "environment steps of all together")
    add("--until-solved", action="store_true", help="end as soon as the mean return is 195")
    add_number("--unroll", 1, 32, "steps of each environment in a trajectory")
    add("--stream", action="store_true", help="observers go on while the learner learns")
    add_number("--seed", 0, 0, "where random numbers start")
    add("--out", type=Path, metavar="DIR", help="folder for the results (default: runs/TIME)")
    return Options(**vars(parser.parse_args(arguments)))


def whole_number(least: int) -> Callable[[str], int]:
    """Returns a function that parses whole numbers from ``least`` up."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")

    return read
