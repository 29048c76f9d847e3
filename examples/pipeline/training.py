"""Trains a pipeline, and measures it under each schedule."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from arguments import (
    MEASURED_STEPS,
    SCHEDULES,
    SHRINKING,
    AnySchedule,
    Options,
    make_schedule,
)
from numerals import Images, batches, padded
from torch import Tensor, nn

from torchweft.errors import ConfigurationError
from torchweft.pipeline import Pipe, PipeOptimizer, SchedulePipeDream
from torchweft.pipeline.elastic import ElasticPipe, FreezeFraction, Samples
from torchweft.pipeline.recording import Recording
from torchweft.progress import Display

AnyPipe = Pipe | ElasticPipe
ADAM = functools.partial(torch.optim.Adam, lr=2e-3)
loss_of = nn.functional.cross_entropy


@dataclass
class History:
    """The record of a training run.

    Attributes:
        losses: The loss of each step.
        accuracies: The share of test images that were recognised, after each epoch.
        stages: The number of stages in each epoch.
        frozen: The number of frozen layers in each epoch.
        seconds: Duration of the training.
    """

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A short measurement of one schedule.

    Attributes:
        schedule: Its name.
        recording: The measured steps.
        steps_per_s: Steps of the whole pipeline, driver included.
        versions_held: For each worker, the most versions of its weights at once.
    """

    schedule: str
    recording: Recording
    steps_per_s: float
    versions_held: tuple[int, ...]


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
    size = options.images_of_a_step
    total = options.epochs * (len(trained) // size)
    began = time.monotonic()
    with make_pipe(model, workers, schedule, options) as pipe:
        # With PipeDream, the workers have their optimizers from the begin, and step them.
        endless = isinstance(schedule, SchedulePipeDream)
        optimizer = None if endless else pipe.optimizer(ADAM)
        with Display(total, "step") as shown:
            for _ in range(options.epochs):
                epoch = batches(trained, size, generator)
                losses = steps(pipe, epoch, optimizer) if optimizer else run(pipe, epoch)
                for loss in losses:
                    history.losses.append(loss.item())
                    shown.step(loss=history.losses[-1])
                note_epoch(history, pipe, 1 + options.freeze if options.freeze else 0, tested)
                shown.step(0, accuracy=history.accuracies[-1])
        model.load_state_dict(pipe.state_dict())
    history.seconds = time.monotonic() - began


def train_shrinking(
    model: nn.Sequential,
    trained: Images,
    tested: Images,
    options: Options,
    workers: Sequence[str],
    history: History,
) -> None:
    """Trains a model whose first layers freeze one after another, so that its pipeline shrinks."""
    samples = Samples(len(trained), options.batch, options.seed)
    schedule = functools.partial(SHRINKING[options.schedule], options.microbatches)
    freeze = FreezeFraction(options.shrink, first=3, every=2)
    began = time.monotonic()
    with (
        ElasticPipe(model, workers, schedule, loss_of, freeze=freeze) as pipe,
        Display(options.epochs * len(samples), "step") as shown,
    ):
        optimizer = pipe.optimizer(ADAM)
        while samples.epoch < options.epochs:
            for chosen in samples:
                optimizer.zero_grad()
                loss = pipe.step(trained.pixels[chosen], trained.digits[chosen], samples=chosen)
                optimizer.step()
                history.losses.append(loss.item())
                shown.step(loss=history.losses[-1])
            note_epoch(history, pipe, pipe.shape.n_frozen, tested)
            shown.step(0, accuracy=history.accuracies[-1], stages=history.stages[-1])
            pipe.end_epoch()
        model.load_state_dict(pipe.pipe.state_dict())
    history.seconds = time.monotonic() - began


def note_epoch(history: History, pipe: AnyPipe, n_frozen: int, tested: Images) -> None:
    """Notes the results of an epoch."""
    history.accuracies.append(accuracy(pipe, tested))
    history.stages.append(pipe.table.n_stages)
    history.frozen.append(n_frozen)


def make_pipe(
    model: nn.Sequential, workers: Sequence[str], schedule: AnySchedule, options: Options
) -> Pipe:
    """Cuts a model into the stages of a schedule, on workers."""
    optimizer = ADAM if isinstance(schedule, SchedulePipeDream) else None
    checkpoint = options.checkpoint
    return Pipe(model, workers, schedule, loss_of, checkpoint=checkpoint, optimizer=optimizer)


def steps(pipe: Pipe, found: Iterator[Images], optimizer: PipeOptimizer) -> Iterator[Tensor]:
    """Trains on each batch in a step of its own; yields the losses."""
    for batch in found:
        optimizer.zero_grad()
        loss = pipe.step(batch.pixels, batch.digits)
        optimizer.step()
        yield loss


def run(pipe: Pipe, found: Iterator[Images]) -> Iterator[Tensor]:
    """Trains on all batches without a break, each of them one minibatch; yields the losses."""
    return pipe.run((batch.pixels, batch.digits) for batch in found)


def accuracy(pipe: AnyPipe, tested: Images) -> float:
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
        with make_pipe(copied, workers, schedule, options) as pipe:
            repeat(pipe, batch, 1, options)  # The first step makes what the others reuse.
            began = time.monotonic()
            with pipe.recording() as recording:
                repeat(pipe, batch, MEASURED_STEPS, options)
                seconds = time.monotonic() - began
            versions = tuple(pipe.versions_held())
        yield Trial(name, recording, MEASURED_STEPS / seconds, versions)


def repeat(pipe: Pipe, batch: Images, count: int, options: Options) -> None:
    """Runs a batch a few times.

    PipeDream gets the micro-batches of the others as its minibatches, so that all schedules run
    actions of one size.
    """
    if pipe.table.is_asynchronous:
        pixels = batch.pixels.chunk(options.microbatches)
        digits = batch.digits.chunk(options.microbatches)
        for _ in pipe.run(count * list(zip(pixels, digits, strict=True))):
            pass
        return
    for _ in range(count):
        pipe.step(batch.pixels, batch.digits)
