"""Trains a pipeline, and measures it under each schedule."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from arguments import SCHEDULES, Options, make_schedule
from numerals import Images, batches, padded
from torch import nn

from torchweft.errors import ConfigurationError
from torchweft.pipeline import Pipe
from torchweft.pipeline.recording import Recording
from torchweft.progress import Display

RATE = 2e-3
MEASURED_STEPS = 5
loss_of = nn.functional.cross_entropy


@dataclass
class History:
    """The record of a training run.

    Attributes:
        losses: The loss of each step.
        accuracies: The share of test images that were recognised, after each epoch.
        seconds: Duration of the training.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A short measurement of one schedule.

    Attributes:
        schedule: Its name.
        recording: The measured steps.
        steps_per_s: Steps of the whole pipeline, driver included.
    """

    schedule: str
    recording: Recording
    steps_per_s: float


def train(
    model: nn.Sequential,
    trained: Images,
    tested: Images,
    options: Options,
    workers: Sequence[str],
    history: History,
) -> None:
    """Trains a model on workers; its weights are those of the workers afterwards."""
    schedule = make_schedule(options, options.schedule, options.stages)
    generator = torch.Generator().manual_seed(options.seed)
    total = options.epochs * (len(trained) // options.batch)
    began = time.monotonic()
    with Pipe(model, workers, schedule, loss_of, checkpoint=options.checkpoint) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=RATE)
        with Display(total, "step") as shown:
            for _ in range(options.epochs):
                for batch in batches(trained, options.batch, generator):
                    optimizer.zero_grad()
                    loss = pipe.step(batch.pixels, batch.digits)
                    optimizer.step()
                    history.losses.append(loss.item())
                    shown.step(loss=history.losses[-1])
                history.accuracies.append(accuracy(pipe, tested))
                shown.step(0, accuracy=history.accuracies[-1])
        model.load_state_dict(pipe.state_dict())
    history.seconds = time.monotonic() - began


def accuracy(pipe: Pipe, tested: Images) -> float:
    """Returns the share of images that a pipeline recognises."""
    scores = pipe.eval()(padded(tested.pixels, pipe.table.n_microbatches))
    pipe.train()
    found = scores[: len(tested)].argmax(dim=1)
    return (found == tested.digits).float().mean().item()


def measure(
    model: nn.Sequential, images: Images, options: Options, workers: Sequence[str]
) -> Iterator[Trial | tuple[str, str]]:
    """Runs a few steps of a model under each schedule, without changing its weights.

    Yields:
        A trial; or, if a schedule is impossible with these options, its name and the reason.
    """
    batch = next(batches(images, options.batch, torch.Generator().manual_seed(0)))
    for name in SCHEDULES:
        stages = options.stages if name == options.schedule else None
        try:
            schedule = make_schedule(options, name, stages)
        except ConfigurationError as error:
            yield name, str(error)
            continue
        copied = copy.deepcopy(model)
        with Pipe(copied, workers, schedule, loss_of, checkpoint=options.checkpoint) as pipe:
            pipe.step(batch.pixels, batch.digits)  # The first step makes what the others reuse.
            began = time.monotonic()
            with pipe.recording() as recording:
                for _ in range(MEASURED_STEPS):
                    pipe.step(batch.pixels, batch.digits)
                seconds = time.monotonic() - began
        yield Trial(name, recording, MEASURED_STEPS / seconds)
