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
    SchedulePipeDream,
    ScheduleZBVZeroBubble,
)
from torchweft.pipeline.schedules import Schedule, Weights

Checkpoint = Literal["never", "except_last", "always"]
AnySchedule = Schedule | SchedulePipeDream
MEASURED_STEPS = 5


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
        shrink: Which share of the layers that still train is frozen from time to time; 0 for none.
        blocks: Residual blocks of the network.
        epochs: Passes over the images.
        batch: Images of a step.
        replicas: Workers of each stage; None for one each.
        weights: Which versions of the weights PipeDream uses.
        seed: Seed of the weights and of the order of the images.
        out: Folder for the results; None for one named after the time.
    """

    schedule: str
    workers: int
    stages: int | None
    microbatches: int
    checkpoint: Checkpoint
    freeze: int
    shrink: float
    blocks: int
    epochs: int
    batch: int
    replicas: tuple[int, ...] | None
    weights: str
    seed: int
    out: Path | None

    @property
    def images_of_a_step(self) -> int:
        """Images for each step of the optimizers.

        A minibatch of PipeDream is as large as a micro-batch of the others: its steps use weights
        that are a few steps old, so they have to be short.
        """
        is_cut = self.schedule != "pipedream"
        return self.batch if is_cut else self.batch // self.microbatches


SCHEDULES: dict[str, Callable[[Options, int], AnySchedule]] = {
    "naive": lambda options, stages: ScheduleNaive(options.microbatches),
    "gpipe": lambda options, stages: ScheduleGPipe(options.microbatches, options.replicas),
    "1f1b": lambda options, stages: Schedule1F1B(options.microbatches, options.replicas),
    "interleaved": lambda options, stages: ScheduleInterleaved1F1B(options.microbatches, stages),
    "zbv": lambda options, stages: ScheduleZBVZeroBubble(options.microbatches),
    "pipedream": lambda options, stages: SchedulePipeDream(
        MEASURED_STEPS * options.microbatches, options.weights, options.replicas
    ),
}
"""By name, makes a schedule from the options and the number of stages of a worker.

A further schedule needs an entry here: it is then an option, and measured after the training.
"""
SHRINKING = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""The schedules of a pipeline that becomes shorter, with more replicas, as layers freeze."""
REPLICATED = ("gpipe", "1f1b", "pipedream")
"""The schedules in which several workers may hold one stage."""


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
    text = "after 3, 5, 7, ... epochs, freeze this share of the layers that still train"
    add("--shrink", type=share, default=0.0, metavar="SHARE", help=text)
    _add_number(parser, "--blocks", 1, 8, "residual blocks of the network")
    _add_number(parser, "--epochs", 1, 10, "passes over the images")
    _add_number(parser, "--batch", 1, 128, "images of a step")
    text = "workers of each stage, such as 2,1,1 (default: one each)"
    add("--replicas", type=whole_numbers, metavar="N,N", help=text)
    rules = [rule.value for rule in Weights]
    add("--weights", choices=rules, default=rules[0], help=f"for pipedream (default: {rules[0]})")
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
    if options.shrink and options.schedule not in SHRINKING:
        raise ConfigurationError(f"--shrink is for {' and '.join(SHRINKING)}")
    if options.shrink and (options.freeze or options.replicas):
        raise ConfigurationError("--shrink chooses frozen layers and replicas itself")
    make_schedule(options, options.schedule, options.stages)


def make_schedule(options: Options, name: str, stages: int | None = None) -> AnySchedule:
    """Makes a schedule.

    Args:
        options: The workers, their stages, the micro-batches and the blocks.
        name: Its name, a key of ``SCHEDULES``.
        stages: Stages of the model; None for as few as the schedule has.

    Raises:
        ConfigurationError: There is none for these numbers.
    """
    workers, layers = options.workers, options.blocks + 2
    if options.replicas and name not in REPLICATED:
        raise ConfigurationError(f"{name} has no replicas; {', '.join(REPLICATED)} have")
    if name == "pipedream" and options.checkpoint == "except_last":
        raise ConfigurationError("pipedream has no last micro-batch; pass --checkpoint always")
    if stages is not None and stages % workers:
        raise ConfigurationError(f"--stages {stages} is no multiple of {workers} workers")
    schedule = SCHEDULES[name](options, max(2, (stages or 0) // workers))
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


def share(text: str) -> float:
    """Parses a number from 0 up and below 1."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < 1:
            return number
    raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up and below 1")


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parses whole numbers from 1 up, separated by commas."""
    return tuple(map(whole_number(1), text.split(",")))


def _add_number(
    parser: argparse.ArgumentParser, option: str, least: int, usual: int | None, text: str
) -> None:
    if usual is not None:
        text += f" (default: {usual})"
    parser.add_argument(option, type=whole_number(least), default=usual, metavar="N", help=text)
