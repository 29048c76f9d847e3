"""Parses the command line."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torchweft.embedding import SGD, Adagrad, RowWiseAdagrad, Rule, SparseAdam

RULES: dict[str, Rule] = {
    "adagrad": Adagrad(lr=0.05),
    "rowwise": RowWiseAdagrad(lr=0.05),
    "adam": SparseAdam(lr=2e-3),
    "sgd": SGD(lr=5.0),
}
"""The optimizers of the rows, by name; a further one needs an entry here."""


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        trainers: Processes that train.
        servers: Processes that hold rows.
        steps: Steps of all trainers together.
        batch: Impressions of a step, of each trainer.
        staleness: The bound; None for the asynchronous mode.
        cache: The share of the rows that each trainer keeps; 0 for none.
        optimizer: The optimizer of the rows, a key of ``RULES``.
        seed: Seed of the impressions and of the weights.
        out: Folder for the results; None for one named after the time.
    """

    trainers: int
    servers: int
    steps: int
    batch: int
    staleness: int | None
    cache: float
    optimizer: str
    seed: int
    out: Path | None


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without listing all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parses the command line; exits with status 2 if it is invalid."""
    parser = OneLineParser(
        prog="train.py", description="Trains a click-through model, its tables on servers."
    )
    add = parser.add_argument

    def add_number(option: str, least: int, usual: int, text: str) -> None:
        text += f" (default: {usual})"
        add(option, type=whole_number(least), default=usual, metavar="N", help=text)

    add_number("--trainers", 1, 2, "processes that train")
    add_number("--servers", 1, 2, "processes that hold rows")
    add_number("--steps", 1, 400, "steps of all trainers together")
    add_number("--batch", 1, 1024, "impressions of a step, of each trainer")
    text = "steps by which a trainer may be ahead, or 'none' for no bound (default: 0)"
    add("--staleness", type=staleness, default=0, metavar="N", help=text)
    text = "share of the rows that each trainer keeps; needs a staleness (default: 0)"
    add("--cache", type=share, default=0.0, metavar="SHARE", help=text)
    text = "optimizer of the rows (default: adagrad)"
    add("--optimizer", choices=list(RULES), default="adagrad", help=text)
    add_number("--seed", 0, 0, "where random numbers start")
    add("--out", type=Path, metavar="DIR", help="folder for the results (default: runs/TIME)")
    found = Options(**vars(parser.parse_args(arguments)))
    if found.cache and not found.staleness:
        parser.error("--cache keeps rows for some steps; add --staleness with at least 1")
    return found


def whole_number(least: int) -> Callable[[str], int]:
    """Returns a function that parses whole numbers from ``least`` up."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")

    return read


def staleness(text: str) -> int | None:
    """Parses a bound of the staleness."""
    return None if text == "none" else whole_number(0)(text)


def share(text: str) -> float:
    """Parses a share."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) <= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
