"""The worker's side of an asynchronous pipeline: a runner whose row has no end.

The worker makes its row part by part, as minibatches enter. It runs each part as soon as it knows
of the minibatch, whatever parts other workers are at, so the pipeline does not run empty.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.worker.peers import Peer
from torchweft.pipeline import host
from torchweft.pipeline.runner import Assignment, Runner, Start
from torchweft.pipeline.schedules import Action, Kind, SchedulePipeDream
from torchweft.pipeline.versions import WeightVersions
from torchweft.rpc import RRef, rpc_async

ENTER = 3
"""The kind of messages with which the driver lets minibatches enter."""


@dataclass(frozen=True)
class StreamAssignment(Assignment):
    """What one worker of an asynchronous pipeline needs to know.

    Attributes:
        schedule: Makes the rows; ``table`` is only for forwards without gradients.
        is_mean: Whether the gradients of an update are divided by the number of its minibatches.
    """

    schedule: SchedulePipeDream
    is_mean: bool


class _Entry(NamedTuple):
    """A minibatch on its way to a worker, or the end of the minibatches.

    Attributes:
        exists: False after the last minibatch.
        inputs: By stage and minibatch, what the stage takes of it.
        targets: By minibatch, its target, for the last stage.
        mark: The end of the GPU work that computes them.
    """

    exists: bool
    inputs: Mapping[int, Mapping[int, Sequence[Any]]]
    targets: Mapping[int, Any]
    mark: Mark | None = None


class StreamRunner(Runner):
    """Runs the stage of one worker for minibatches without end.

    Args:
        assignment: What it runs.
    """

    assignment: StreamAssignment
    unit = "minibatch"

    def __init__(self, assignment: StreamAssignment) -> None:
        super().__init__(assignment)
        self._stage, self._seats = _seat_of(assignment)
        self._versions = WeightVersions(self.stages[self._stage].module)
        self._n_updated = 0
        self._update: Action | None = None
        self.peak_versions = 1

    def _peer_of(self, stage: int, microbatch: int) -> Peer:
        seats = self.assignment.table.replicas(stage)
        return self._peers[seats[microbatch % len(seats)]]

    def _train(self, start: Start) -> None:
        self._begin()
        try:
            self._run_parts(start)
        finally:
            self.peak_versions = self._versions.peak
            self._versions = WeightVersions(self.stages[self._stage].module)

    def _begin(self) -> None:
        module = self.stages[self._stage].module
        module.zero_grad()
        self._versions = WeightVersions(module)
        self._n_updated = 0
        self._update = None
        self.peak_held = 0
        if self.notes is not None:
            self.notes.begin_step()

    def _run_parts(self, start: Start) -> None:
        schedule, me = self.assignment.schedule, self.assignment.worker
        n_workers = len(self.assignment.workers)
        minibatch = 0
        while (entry := self._wait_for(minibatch)).exists:
            device_streams.use(entry.mark, entry.inputs, entry.targets)
            entered = start._replace(inputs=entry.inputs, targets=entry.targets)
            for action in schedule.rows(n_workers, minibatch, 1)[me]:
                self._act(action, entered)
            minibatch += 1
        self._versions.want(math.inf)
        for action in schedule.drain(n_workers, minibatch)[me]:
            self._act(action, start)
        self._end_update()
        self._at = None
        least = self.assignment.table.n_microbatches  # With fewer, a replica had none.
        if self.notes is not None and minibatch >= least:
            self.notes.end_step(self._step, self.peak_held, minibatch)

    def _wait_for(self, minibatch: int) -> _Entry:
        """Waits until a minibatch enters, as long as the program takes; or until there is none."""
        self._at = None
        while not self._mail.empty():  # A worker with enough to do hears of the end as well.
            self._sort(*self._mail.get())
        entry: _Entry = self._take((ENTER, 0, 0, minibatch), math.inf)
        return entry

    def _act(self, action: Action, start: Start) -> None:
        self._end_update()
        self._at = action
        minibatch = action.microbatch
        if action.kind is Kind.FORWARD:
            version = self._version_used(minibatch)
            losses: dict[int, Tensor] = {}
            self._forward(action, start, losses, self._versions.begin(minibatch, version))
            self._versions.want(self._version_used(minibatch + self._seats))
            for loss in losses.values():
                self._report(minibatch, loss)
            self._note_end()
        elif action.kind is Kind.BACKWARD:
            self._backward(action)
            self._versions.end(minibatch)
            self._note_end()
        else:
            self.stages[self._stage].check_weights(minibatch)
            self._send_copies(minibatch)
            self._update = action
            if self._seats == 1:
                self._end_update()

    def _version_used(self, minibatch: int) -> int:
        schedule = self.assignment.schedule
        return schedule.version_used(self._stage, minibatch, len(self.assignment.workers))

    def _end_update(self) -> None:
        """Ends an update, if one has begun, with the gradients of all its minibatches.

        A replica does this as late as it can, before its next action. The others may do their part
        of the update only when a further minibatch enters, and the program decides when that is.
        """
        if self._update is None:
            return
        self._at, self._update = self._update, None
        minibatch = self._at.microbatch
        self._add_copies(minibatch)
        count = minibatch + 1 - self._n_updated
        self._n_updated = minibatch + 1
        if self.assignment.is_mean and count > 1:
            for weight in self.stages[self._stage].parameters():
                if weight.grad is not None:
                    weight.grad = weight.grad / count
        step = (lambda: None) if self.optimizer is None else self.optimizer.step
        self._versions.update(step)
        self._note_end()

    def _note_end(self) -> None:
        if self.notes is not None:
            self.notes.end_action()

    def _report(self, minibatch: int, loss: Tensor) -> None:
        """Sends a loss to the driver; never waits."""
        pipe, driver = self.assignment.pipe, self.assignment.driver
        if driver == self.name:
            report(pipe, self._step, minibatch, loss)
            return
        rpc_async(driver, report, args=(pipe, self._step, minibatch, loss))


def _seat_of(assignment: StreamAssignment) -> tuple[int, int]:
    """Returns the stage of a worker and the number of its replicas."""
    (stage,) = assignment.table.stages_of(assignment.worker)
    return stage, len(assignment.table.replicas(stage))


# What the driver and other workers call


class Report(NamedTuple):
    """The loss of a minibatch, on its way to the driver's loop."""

    minibatch: int
    loss: Tensor
    mark: Mark | None


_reports: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}


def _mark() -> Mark | None:
    return device_streams.mark() if device_streams.HAS_CUDA else None


def open_reports(pipe: int, run: int) -> queue.SimpleQueue[Any]:
    """Returns the queue that gets the losses of a run that this process drives."""
    return _reports.setdefault((pipe, run), queue.SimpleQueue())


def close_reports(pipe: int, run: int) -> None:
    """Drops the losses of a run that still come."""
    _reports.pop((pipe, run), None)


def report(pipe: int, run: int, minibatch: int, loss: Tensor) -> None:
    """Takes the loss of a minibatch to the loop that drives the run; never blocks."""
    reports = _reports.get((pipe, run))
    if reports is not None:
        reports.put(Report(minibatch, loss, _mark()))


def enter(
    pipe: int,
    run: int,
    minibatch: int,
    inputs: Mapping[int, Mapping[int, Sequence[Any]]],
    targets: Mapping[int, Any],
) -> None:
    """Lets a minibatch enter.

    Args:
        pipe: Number of the pipeline.
        run: Number of the run.
        minibatch: Its number, counted from 0.
        inputs: By stage and minibatch, what this worker's stages take of it.
        targets: By minibatch, its target, if this worker runs the last stage for it.
    """
    host.runner_of(pipe).put(run, (ENTER, 0, 0, minibatch), _Entry(True, inputs, targets, _mark()))


def finish(pipe: int, run: int, n_minibatches: int) -> None:
    """Says that no more minibatches will enter."""
    host.runner_of(pipe).put(run, (ENTER, 0, 0, n_minibatches), _Entry(False, {}, {}))


def set_up(assignment: StreamAssignment) -> RRef[host.Host]:
    """Makes the stage of this worker and the thread that runs it."""
    return RRef(host.Host(StreamRunner(assignment)))


def versions_held(pipe: int) -> int:
    """Returns the most versions of its weights that this worker held at once in the last run."""
    runner = host.runner_of(pipe)
    assert isinstance(runner, StreamRunner)
    return runner.peak_versions
