"""The settings of a run, from the command line or from a saved state."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True)
class Settings:
    """Settings of the text, the model and its training.

    Attributes:
        data: Path of the text; None for the text that Python includes.
        trainers: Number of workers that train.
        batch: Columns of text that one trainer reads side by side (B).
        window: Words of a column that are read in one step (T).
        vocabulary: Maximum size of the vocabulary; all other words become one unknown word.
        embedding: Size of a word's embedding (E).
        hidden: Number of the LSTM's outputs for a word (H).
        dropout: Share of values dropped at random in training.
        learning_rate: Learning rate of Adam.
        seed: Random seed.
        logits_travel: Whether the server sends the logits and the trainers compute the loss.
    """

    data: str | None = None
    trainers: int = 2
    batch: int = 16
    window: int = 32
    vocabulary: int = 4000
    embedding: int = 128
    hidden: int = 128
    dropout: float = 0.5
    learning_rate: float = 3e-3
    seed: int = 0
    logits_travel: bool = False


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        settings: Settings of a new run; a resumed run keeps its own.
        epochs: Number of passes over the text.
        minutes: Limit on the training time.
        out: Folder for the results; None for one named after the time, under ``runs``.
        resume: A saved state to resume from.
        on: The launcher that starts the workers.
        is_inside: Whether a launcher has started this program, once for each worker.
    """

    settings: Settings
    epochs: int
    minutes: float
    out: Path | None
    resume: Path | None
    on: str = "local"
    is_inside: bool = False


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without listing all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parses the command line; exits with status 2 if it is invalid."""
    parser = OneLineParser(
        prog="train.py",
        description="Trains a language model with its embedding table and decoder on a server "
        "and LSTMs on several trainers.",
    )
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--epochs",
        type=whole_number(1),
        default=20,
        help="how often to read the text (default: %(default)s)",
    )
    run.add_argument(
        "--minutes",
        type=above_zero,
        default=2.0,
        help="limit on the training time (default: %(default)s)",
    )
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to leave results in (default: runs/TIME)"
    )
    run.add_argument(
        "--resume",
        type=Path,
        metavar="PATH",
        help="go on from a saved state.pt, with the settings it was made with",
    )
    run.add_argument(
        "--on",
        default="local",
        metavar="LAUNCHER",
        help="where to start the workers, for instance ray, or 'ssh --hosts a,b' "
        "(default: %(default)s)",
    )
    run.add_argument(
        "--inside",
        action="store_true",
        help="a launcher has started this program, for the driver, the server and each trainer",
    )
    _add_settings(parser.add_argument_group("settings of a new run"))
    given = parser.parse_args(arguments)
    settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
    return Options(
        settings, given.epochs, given.minutes, given.out, given.resume, given.on, given.inside
    )


def _add_settings(group: argparse._ArgumentGroup) -> None:
    default = asdict(Settings())

    def add(name: str, kind: Callable[[str], object], text: str) -> None:
        option = "--" + name.replace("_", "-")
        text += f" (default: {default[name]})"
        group.add_argument(option, type=kind, default=default[name], metavar="N", help=text)

    group.add_argument("--data", metavar="PATH", help="a UTF-8 text (default: Python's help)")
    add("trainers", whole_number(1), "workers that train")
    add("batch", whole_number(1), "columns of text that a trainer reads side by side")
    add("window", whole_number(1), "words read in one step")
    add("vocabulary", whole_number(2), "most words told apart")
    add("embedding", whole_number(1), "numbers that stand for a word")
    add("hidden", whole_number(1), "numbers that the LSTM puts out for a word")
    add("dropout", share, "share of numbers left out while training")
    add("learning_rate", above_zero, "learning rate of Adam")
    add("seed", whole_number(0), "where random numbers start")
    group.add_argument(
        "--logits-travel",
        action="store_true",
        help="compute the loss on the trainers, to compare the traffic",
    )


def whole_number(least: int) -> Callable[[str], int]:
    """Returns a function that parses whole numbers from ``least`` up."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (number := int(text)) >= least:
                return number
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")

    return read


def above_zero(text: str) -> float:
    """Parses a number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def share(text: str) -> float:
    """Parses a number of at least 0 and below 1."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < 1:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up and below 1")
