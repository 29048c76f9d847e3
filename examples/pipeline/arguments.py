"""Parses the command line, and makes the schedules that it names."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

from torchweft.errors import ConfigurationError
from torchweft.pipeline import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleNaive,
    ScheduleZBVZeroBubble,
)
from torchweft.pipeline.schedules import Schedule

Checkpoint = Literal["never", "except_last", "always"]

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "naive": lambda microbatches, stages: ScheduleNaive(microbatches),
    "gpipe": lambda microbatches, stages: ScheduleGPipe(microbatches),
    "1f1b": lambda microbatches, stages: Schedule1F1B(microbatches),
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": lambda microbatches, stages: ScheduleZBVZeroBubble(microbatches),
}
"""By name, makes a schedule from the micro-batches of a step and the stages of a worker.

A further schedule needs an entry here: it is then an option, and measured after the training.
"""


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
        schedule: Name of the schedule to train with.
        workers: Worker processes, each with its stages.
        stages: Stages of the model; None for as few as the schedule has.
        microbatches: Micro-batches of a step.
        checkpoint: The micro-batches whose activations are dropped and computed again.
        freeze: How many of the first blocks are not trained.
        blocks: Residual blocks of the network.
        epochs: Passes over the images.
        batch: Images of a step.
        seed: Seed of the weights and of the order of the images.
        out: Folder for the results; None for one named after the time.
    """

    schedule: str
    workers: int
    stages: int | None
    microbatches: int
    checkpoint: Checkpoint
    freeze: int
    blocks: int
    epochs: int
    batch: int
    seed: int
    out: Path | None


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without listing all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parses the command line; exits with status 2 if it is invalid."""
    parser = OneLineParser(prog="train.py", description="Trains a pipeline of stages on workers.")
    add = parser.add_argument
    add("--schedule", choices=list(SCHEDULES), default="1f1b", help="(default: 1f1b)")
    _add_number(parser, "--workers", 1, 4, "worker processes, each with one stage or more")
    _add_number(parser, "--stages", 1, None, "stages of the model (default: by the schedule)")
    _add_number(parser, "--microbatches", 1, 8, "micro-batches of a step")
    kinds = get_args(Checkpoint)
    text = "micro-batches whose activations are computed again (default: never)"
    add("--checkpoint", choices=kinds, default="never", help=text)
    _add_number(parser, "--freeze", 0, 0, "how many of the first blocks not to train")
    _add_number(parser, "--blocks", 1, 8, "residual blocks of the network")
    _add_number(parser, "--epochs", 1, 10, "passes over the images")
    _add_number(parser, "--batch", 1, 128, "images of a step")
    _add_number(parser, "--seed", 0, 0, "where random numbers start")
    add("--out", type=Path, metavar="DIR", help="folder for the results (default: runs/TIME)")
    options = Options(**vars(parser.parse_args(arguments)))
    try:
        check(options)
    except ConfigurationError as error:
        parser.error(str(error))
    return options


def check(options: Options) -> None:
    """Checks options that must fit together.

    Raises:
        ConfigurationError: They do not; the message is for the user.
    """
    if options.batch % options.microbatches:
        raise ConfigurationError(
            f"--batch {options.batch} cannot be cut into {options.microbatches} micro-batches"
        )
    if options.freeze > options.blocks:
        raise ConfigurationError(f"--freeze {options.freeze}: there are {options.blocks} blocks")
    make_schedule(options, options.schedule, options.stages)


def make_schedule(options: Options, name: str, stages: int | None = None) -> Schedule:
    """Makes a schedule.

    Args:
        options: The workers, the micro-batches and the blocks.
        name: Its name, a key of ``SCHEDULES``.
        stages: Stages of the model; None for as few as the schedule has.

    Raises:
        ConfigurationError: There is none for these numbers.
    """
    workers, layers = options.workers, options.blocks + 2
    if stages is not None and stages % workers:
        raise ConfigurationError(f"--stages {stages} is no multiple of {workers} workers")
    schedule = SCHEDULES[name](options.microbatches, max(2, (stages or 0) // workers))
    found = schedule.table(workers).n_stages
    if stages not in (None, found):
        raise ConfigurationError(f"{name} has {found} stages on {workers} workers, not {stages}")
    if found > layers:
        raise ConfigurationError(
            f"{name} has {found} stages on {workers} workers, and the network {layers} layers; "
            f"pass --blocks {found - 2} or more"
        )
    return schedule


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
