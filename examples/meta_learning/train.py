"""Learns to learn, over workers: ``python train.py sinusoid``, ``... digits``, ``make demo-meta``.

This program, the driver, holds the parameters and steps them; workers adapt them to tasks.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from command import Options, parse_options
from digits import HELD_OUT, Digits, images_by_digit
from learning import Comparison, History, compare, train
from maml import Problem
from picture import draw_picture
from sinusoid import Sinusoids
from torch import nn

import torchweft as weft
from torchweft import rpc
from torchweft.errors import WeftError


class Unusable(ValueError):
    """The program cannot run as requested; the message is for the user."""


def make_problems(name: str) -> tuple[Problem, Problem]:
    """Returns the tasks to train on and the tasks to test with.

    Raises:
        Unusable: The package with the images is missing.
    """
    if name == "sinusoid":
        return Sinusoids(), Sinusoids()  # test tasks have other numbers, so other waves
    try:
        images_by_digit()
    except ImportError as error:
        message = "digits needs scikit-learn, which is missing: in the clone, pip install '.[meta]'"
        raise Unusable(message) from error
    problem = Digits()
    return problem, replace(problem, classes=HELD_OUT, turned=False)


def make_folder(path: Path | None) -> Path:
    """Creates the folder for the results if it is missing, and checks that it is writable."""
    path = path or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"{path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise Unusable(f"{path} cannot be written to")
    return path


@contextlib.contextmanager
def started_workers(count: int) -> Iterator[list[str]]:
    """Starts workers and yields their names; each worker computes with one thread."""
    torch.set_num_threads(1)
    if not count:
        yield []
        return
    # check=False: a run that lost a worker is valid, since other workers ran its tasks.
    with weft.cluster(workers=count, check=False) as cluster:
        for name in cluster.names:
            rpc.rpc_sync(name, torch.set_num_threads, args=(1,))
        yield list(cluster.names)


def run(options: Options, history: History) -> None:
    """Trains, compares with training from scratch, and writes figures and a picture."""
    problem, tested = make_problems(options.problem)
    folder = make_folder(options.out)
    torch.manual_seed(options.schedule.seed)
    model = problem.make_network().to(torch.float64 if options.double else torch.float32)
    untrained = copy.deepcopy(model)
    with started_workers(options.workers) as workers:
        began = time.monotonic()
        train(model, problem, tested, options.schedule, workers, history)
        seconds = time.monotonic() - began
        comparison = compare(model, untrained, tested, workers, options.schedule.held_out)
    print(summary(tested, history, comparison, seconds))
    write_figures(options, history, comparison, seconds, folder / "figures.json")
    report_picture(tested, model, untrained, history, comparison, folder)


def summary(problem: Problem, history: History, comparison: Comparison, seconds: float) -> str:
    """Returns a summary of the results as text."""
    test, steps = history.tests[-1], problem.inner_steps
    return "\n".join(
        [
            f"{test.iteration:,} meta-steps in {seconds:.0f} s",
            f"{problem.score_name} of held-out tasks: {test.before:.3f} as it is, "
            f"{test.after:.3f} after {steps} inner step{'s' if steps > 1 else ''}",
            f"from scratch: {comparison.scratch[steps]:.3f} after as many, "
            f"{comparison.scratch[-1]:.3f} after {len(comparison.scratch) - 1} "
            f"(steps of {comparison.scratch_rate:g})",
        ]
    )


def write_figures(
    options: Options, history: History, comparison: Comparison, seconds: float, path: Path
) -> None:
    """Writes all figures as JSON."""
    figures = {
        "problem": options.problem,
        "workers": options.workers,
        "schedule": asdict(options.schedule),
        "seconds": seconds,
        **asdict(history),
        "comparison": asdict(comparison),
    }
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def report_picture(
    problem: Problem,
    model: nn.Module,
    untrained: nn.Module,
    history: History,
    comparison: Comparison,
    folder: Path,
) -> None:
    """Draws the picture if matplotlib is installed, and prints which files were written."""
    left = "figures.json is"
    try:
        draw_picture(problem, model, untrained, history, comparison, folder / "adaptation.png")
        left = "adaptation.png and figures.json are"
    except ImportError:
        print("no picture was drawn: matplotlib is missing (in the clone, pip install '.[meta]')")
    print(f"{left} in {folder}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = parse_options(arguments)
    history = History()
    try:
        run(options, history)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped after {len(history.losses):,} meta-steps; nothing was kept")
        return 130
    except WeftError as error:
        print(f"error after {len(history.losses):,} meta-steps: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
