"""Trains a residual network as a pipeline on workers: ``python train.py``, ``make demo-pipeline``.

This program, the driver, sends batches and gets losses. Each worker holds some stages with their
weights and their optimizer; activations and gradients go from stage to stage directly.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from arguments import Options, parse_options
from charts import draw_timelines
from numerals import Images, load_images
from residual import make_network
from torch import nn
from training import History, Trial, measure, train, train_shrinking

import torchweft as weft
from torchweft import rpc
from torchweft.errors import WeftError
from torchweft.probe import usable_cores

ADVICE = "in the clone, pip install '.[pipeline]'"


class Unusable(ValueError):
    """The program cannot run as requested; the message is for the user."""


def load() -> tuple[Images, Images]:
    """Returns the images to train on, and those for the test."""
    try:
        return load_images()
    except ImportError as error:
        raise Unusable(f"scikit-learn is missing: {ADVICE}") from error


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
    with weft.cluster(workers=count) as cluster:
        for name in cluster.names:
            rpc.rpc_sync(name, torch.set_num_threads, args=(1,))
        yield list(cluster.names)


def run(options: Options, history: History) -> None:
    """Trains, measures all schedules, and writes figures and pictures."""
    trained, tested = load()
    folder = make_folder(options.out)
    torch.manual_seed(options.seed)
    model = make_network(options.blocks, options.freeze)
    with started_workers(options.workers) as workers:
        trains = train_shrinking if options.shrink else train
        trains(model, trained, tested, options, workers, history)
        print(training_summary(options, history))
        trials = compare(model, trained, options, workers)
    write_figures(options, history, trials, folder / "figures.json")
    report_pictures(options, trials, folder)


def training_summary(options: Options, history: History) -> str:
    """Returns the result of the training as text."""
    size = options.images_of_a_step
    text = (
        f"{len(history.losses):,} steps of {size} images in {history.seconds:.0f} s "
        f"({options.schedule}); {100 * history.accuracies[-1]:.1f} % of the test images recognised"
    )
    if options.shrink:
        text += f"\nstages by epoch: {listed(history.stages)}"
        text += f"\nfrozen layers:   {listed(history.frozen)}"
    return text


def compare(
    model: nn.Sequential, images: Images, options: Options, workers: Sequence[str]
) -> list[Trial]:
    """Measures all schedules and prints a line for each; returns those that are possible."""
    cores = len(usable_cores())
    if cores < options.workers:
        print(
            f"{options.workers} workers share {cores} core{'s' if cores > 1 else ''}: "
            "a worker that waits for a core counts as busy"
        )
    held = "activations held"
    print(f"{'schedule':12} {'idle':>8} {'predicted':>10} {'steps/s':>8}  {held:16}  versions held")
    trials = []
    for trial in measure(model, images, options, workers):
        if isinstance(trial, Trial):
            trials.append(trial)
            figures = trial_figures(trial)
            print(
                f"{trial.schedule:12} {100 * figures['idle_share']:6.1f} % "
                f"{100 * figures['predicted_idle_share']:8.1f} % {trial.steps_per_s:8.2f}  "
                f"{listed(trial.recording.peak_held):16}  {listed(trial.versions_held)}"
            )
        else:
            name, reason = trial
            print(f"{name:12} left out: {reason}")
    return trials


def listed(counts: Sequence[int]) -> str:
    """Returns the figures of all workers as text."""
    return " ".join(map(str, counts))


def trial_figures(trial: Trial) -> dict[str, Any]:
    """Returns the figures of one schedule."""
    recording = trial.recording
    by_worker = zip(*(each.idle_shares for each in recording.steps), strict=True)
    return {
        "stages": recording.timeline.table.n_stages,
        "idle_share": fmean(each.idle_share for each in recording.steps),
        "predicted_idle_share": recording.predicted.idle_share,
        "idle_share_by_worker": [fmean(column) for column in by_worker],
        "peak_activations": list(recording.peak_held),
        "versions_held": list(trial.versions_held),
        "steps_per_s": trial.steps_per_s,
    }


def write_figures(options: Options, history: History, trials: Sequence[Trial], path: Path) -> None:
    """Writes all figures as JSON; the schedule that was trained with has the accuracy, too."""
    schedules = {each.schedule: trial_figures(each) for each in trials}
    schedules[options.schedule]["accuracy"] = history.accuracies[-1]
    figures = {
        "options": {**asdict(options), "out": None if options.out is None else str(options.out)},
        "cores": len(usable_cores()),
        "accuracy": history.accuracies[-1],
        **asdict(history),
        "schedules": schedules,
    }
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def report_pictures(options: Options, trials: Sequence[Trial], folder: Path) -> None:
    """Draws the timelines, and prints which files were written."""
    recording = next(each.recording for each in trials if each.schedule == options.schedule)
    picture = recording.timeline.svg(recording.predicted)
    (folder / "timeline.svg").write_text(picture, encoding="utf-8")
    (folder / "timeline.json").write_text(recording.timeline.trace(), encoding="utf-8")
    left = "timeline.svg, timeline.json (for ui.perfetto.dev) and figures.json"
    try:
        draw_timelines(trials, folder / "timelines.png")
        left = "timelines.png, " + left
    except ImportError:
        print(f"not all pictures were drawn: matplotlib is missing ({ADVICE})")
    print(f"{left} are in {folder}")


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
        print(f"stopped after {len(history.losses):,} steps; nothing was kept")
        return 130
    except WeftError as error:
        print(f"error after {len(history.losses):,} steps: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
