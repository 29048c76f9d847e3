"""What the driver of a pipeline, and its workers, call on a worker."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.engine.threads import device_streams
from torchweft.engine.worker.calls import current_call
from torchweft.errors import ArgumentTypeError
from torchweft.optim.clipping import norm, on_host
from torchweft.pipeline.recording import Notes, WorkerNotes
from torchweft.pipeline.runner import START, Assignment, Runner, Start
from torchweft.probe import clock_id
from torchweft.rpc import RRef, functions
from torchweft.rpc.futures import OrderedFuture

_runners: weakref.WeakValueDictionary[int, Runner] = weakref.WeakValueDictionary()


class Host:
    """Keeps the runner of a pipeline; its end, when no reference is left, ends the runner.

    Args:
        runner: The runner.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        _runners[runner.assignment.pipe] = runner
        self._finalize = weakref.finalize(self, runner.close)

    def close(self) -> None:
        """Ends the runner."""
        self._finalize()


@functions.async_execution
def start(
    pipe: int,
    step: int,
    is_training: bool,
    zero_grad: bool | None,
    inputs: Mapping[int, Mapping[int, Sequence[Any]]],
    targets: Mapping[int, Any],
) -> torch.futures.Future[Any]:
    """Runs a worker's row once; answered when it is done."""
    done: OrderedFuture[Any] = OrderedFuture()
    mark = device_streams.mark() if device_streams.HAS_CUDA else None
    command = Start(step, is_training, zero_grad, inputs, targets, done, mark, current_call.get())
    runner_of(pipe).put(step, START, command)
    return done


def abort(pipe: int, step: int) -> None:
    """Ends a step that failed on another worker."""
    runner = _runners.get(pipe)
    if runner is not None:
        runner.put(step, (), None)


def runner_of(pipe: int) -> Runner:
    """Returns the runner of a pipeline on this worker.

    Raises:
        ArgumentTypeError: The pipeline was closed.
    """
    runner = _runners.get(pipe)
    if runner is None:
        raise ArgumentTypeError(f"there is no pipeline {pipe} on this worker; it was closed")
    return runner


def set_up(assignment: Assignment) -> RRef[Host]:
    """Makes the stages of this worker and the thread that runs them."""
    return RRef(Host(Runner(assignment)))


def close(pipe: int) -> None:
    """Ends the runner of a pipeline; the last reference releases its stages."""
    # Else a step that comes before that reference has gone would be put to it, and never answered.
    runner = _runners.pop(pipe, None)
    if runner is not None:
        runner.close()


def first_values(pipe: int, group: int) -> list[Tensor]:
    """Returns the weights of the first member of a group of copies, which this worker holds."""
    runner = runner_of(pipe)
    member = runner.assignment.copies.groups[group][0]
    module = runner.stages[member.stage].module
    return [each.detach() for each in runner.assignment.copies.weights(member, module)]


def set_values(pipe: int, group: int, values: Sequence[Tensor]) -> None:
    """Sets the weights of this worker's members of a group of copies."""
    runner = runner_of(pipe)
    copies = runner.assignment.copies
    with torch.no_grad():
        for member in copies.groups[group]:
            if member.worker == runner.assignment.worker:
                module = runner.stages[member.stage].module
                for weight, value in zip(copies.weights(member, module), values, strict=True):
                    weight.copy_(value)


def norms(pipe: int, norm_type: float) -> Tensor:
    """Returns the norms of this worker's gradients, each weight once in the pipeline."""
    runner = runner_of(pipe)
    copies, me = runner.assignment.copies, runner.assignment.worker
    found = [
        norm(weight.grad.detach().double(), norm_type)
        for number, stage in runner.stages.items()
        for name, weight in stage.module.named_parameters()
        if weight.grad is not None and copies.is_first(me, number, name)
    ]
    return torch.stack(on_host(found)) if found else torch.empty(0, dtype=torch.float64)


def scale_gradients(pipe: int, factor: float) -> None:
    """Multiplies this worker's gradients with a factor."""
    for stage in runner_of(pipe).stages.values():
        for weight in stage.parameters():
            if weight.grad is not None:
                weight.grad.mul_(factor)


def set_mode(pipe: int, is_training: bool) -> None:
    """Sets the mode of this worker's stages."""
    for stage in runner_of(pipe).stages.values():
        stage.module.train(is_training)


def peak_held(pipe: int) -> int:
    """Returns the most micro-batches whose activations this worker held in the last step."""
    return runner_of(pipe).peak_held


def start_recording(pipe: int) -> None:
    """Has this worker note when its actions begin and end."""
    runner_of(pipe).notes = Notes()


def stop_recording(pipe: int) -> WorkerNotes:
    """Ends the recording on this worker; returns its notes."""
    runner = runner_of(pipe)
    notes, runner.notes = runner.notes or Notes(), None
    return WorkerNotes(clock_id(), notes.steps)
