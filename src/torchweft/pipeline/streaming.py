"""The worker's side of an asynchronous pipeline: a runner whose row has no end.

The worker makes its row part by part, as minibatches enter. It runs each part as soon as it knows
of the minibatch, whatever parts other workers are at, so the pipeline does not run empty.

A minibatch under way has a graph, which autograd needs unchanged until its backward, and the
optimizer steps before that. Copies for each minibatch would hold one set of weights too many. So
graphs are made of *leaves* that share the memory of the weights. The weights move to new memory
when the optimizer is about to change memory that is still needed, and only then.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchweft.extending import device_mark
from torchweft.pipeline.runner import Assignment, Runner, StartCommand
from torchweft.pipeline.schedules import Action, Kind
from torchweft.pipeline.stage import Leaves
from torchweft.rpc import RRef, on

ENTER = 3
"""The kind of messages with which the driver lets minibatches enter."""


class WeightVersions:
    """Keeps the versions of a stage's weights that minibatches use. One thread uses it.

    A version is the number of updates that it contains. The newest is the module itself; weights
    that require no grad, and buffers, have no versions.

    Args:
        module: The stage's module. Its weights keep their identity, which optimizers need, but may
            get other memory in an update.
    """

    def __init__(self, module: nn.Module) -> None:
        self.newest = 0
        self.peak = 1
        self._own = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._users: dict[int, int] = {}
        self._wanted = 0.0

    def begin(self, minibatch: int, version: int) -> Leaves:
        """Returns the leaves with which the module runs a minibatch, by name.

        Args:
            minibatch: The minibatch; it uses the version until its ``end``.
            version: The newest, or one that ``want`` asked to keep.
        """
        self._users[minibatch] = version
        return self._leaves_of(version)

    def end(self, minibatch: int) -> None:
        """Adds the gradients of a minibatch's backward to those of the module's own weights."""
        leaves = self._leaves[self._users.pop(minibatch)]
        for name, weight in self._own.items():
            found, leaves[name].grad = leaves[name].grad, None
            if found is not None:
                weight.grad = found if weight.grad is None else weight.grad + found
                hooks: Any = weight
                for hook in list((hooks._post_accumulate_grad_hooks or {}).values()):
                    hook(weight)
        self._release()

    def want(self, version: float) -> None:
        """Says that later minibatches use no version before this one; infinity: none at all."""
        self._wanted = version
        self._release()

    def update(self, step: Callable[[], object]) -> None:
        """Makes the next version.

        Args:
            step: Changes the module's weights in place, as an optimizer's ``step`` does.
        """
        if self._is_needed(self.newest):
            self._leaves_of(self.newest)
            for weight in self._own.values():
                weight.data = weight.data.clone()
        else:
            self._leaves.pop(self.newest, None)
        step()
        self.newest += 1
        for weight in self._own.values():
            weight.grad = None
        self.peak = max(self.peak, len(self._leaves) + 1)

    def _leaves_of(self, version: int) -> dict[str, Tensor]:
        if version not in self._leaves:
            assert version == self.newest, f"version {version} is gone; {self.newest} is the newest"
            # ``data`` shares the memory, and counts changes by itself: a step after the move to
            # new memory is no change of the leaf.
            self._leaves[version] = {name: _leaf_of(weight) for name, weight in self._own.items()}
        return self._leaves[version]

    def _is_needed(self, version: int) -> bool:
        return version >= self._wanted or version in self._users.values()

    def _release(self) -> None:
        for version in [each for each in self._leaves if not self._is_needed(each)]:
            del self._leaves[version]


def _leaf_of(weight: Tensor) -> Tensor:
    """Returns a leaf with the memory of a weight, and its hooks on the gradient."""
    leaf = weight.data.requires_grad_()
    hooked: Any = weight
    if hooked._backward_hooks:
        setattr(leaf, "_backward_hooks", hooked._backward_hooks)  # noqa: B010
    return leaf


class EnteringMinibatch(NamedTuple):
    """A minibatch on its way to a worker, or the end of the minibatches.

    Attributes:
        exists: False after the last minibatch.
        inputs: By stage and minibatch, what the stage takes of it.
        targets: By minibatch, its target, for the last stage.
        mark: Marks the end of the GPU work that computes them.
    """

    exists: bool
    inputs: Mapping[int, Mapping[int, Sequence[Any]]]
    targets: Mapping[int, Any]
    mark: Callable[..., None]


class StreamRunner(Runner):
    """Runs the stage of one worker for minibatches without end.

    Args:
        assignment: What it runs.
    """

    unit = "minibatch"

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        assert assignment.endless is not None
        self._schedule = assignment.endless
        (self._stage,) = assignment.table.stages_of(assignment.worker)
        self._seats = len(assignment.table.replicas(self._stage))
        self._versions = WeightVersions(self.stages[self._stage].module)
        self._n_updated = 0
        self._update: Action | None = None

    def _peer_of(self, stage: int, microbatch: int) -> Any:
        seats = self.assignment.table.replicas(stage)
        return self._peers[seats[microbatch % len(seats)]]

    def _train(self, start: StartCommand) -> None:
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

    def _run_parts(self, start: StartCommand) -> None:
        schedule, me = self._schedule, self.assignment.worker
        n_workers = len(self.assignment.workers)
        minibatch = 0
        while (entry := self._wait_for(minibatch)).exists:
            entry.mark(entry.inputs, entry.targets)
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

    def _wait_for(self, minibatch: int) -> EnteringMinibatch:
        """Waits until a minibatch enters, as long as the program takes; or until there is none."""
        self._at = None
        while not self._mail.empty():  # A worker with enough to do hears of the end as well.
            self._sort(*self._mail.get())
        entry: EnteringMinibatch = self._take((ENTER, 0, 0, minibatch), math.inf)
        return entry

    def _act(self, action: Action, start: StartCommand) -> None:
        self._end_update()
        self._at = action
        minibatch = action.microbatch
        if action.kind is Kind.FORWARD:
            version = self._version_used(minibatch)
            losses: dict[int, Tensor] = {}
            self._forward(action, start, losses, self._versions.begin(minibatch, version))
            self._versions.want(self._version_used(minibatch + self._seats))
            for loss in losses.values():
                assert start.reports is not None
                _report(start.reports, minibatch, loss)
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
        return self._schedule.version_used(self._stage, minibatch, len(self.assignment.workers))

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
        if self.assignment.settings.is_mean and count > 1:
            for weight in self.stages[self._stage].parameters():
                if weight.grad is not None:
                    weight.grad = weight.grad / count
        step = (lambda: None) if self.optimizer is None else self.optimizer.step
        self._versions.update(step)
        self._note_end()

    def _note_end(self) -> None:
        if self.notes is not None:
            self.notes.end_action()


class LossReport(NamedTuple):
    """The loss of a minibatch, on its way to the driver's loop."""

    minibatch: int
    loss: Tensor
    mark: Callable[..., None]


class LossQueue:
    """Takes the losses of a run to the loop that drives it; the driver makes it. Thread-safe."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, minibatch: int, loss: Tensor) -> None:
        """Takes the loss of a minibatch; never blocks."""
        mark = device_mark()
        self.events.put(LossReport(minibatch, loss, mark))


def _report(reports: RRef[LossQueue], minibatch: int, loss: Tensor) -> None:
    """Sends a loss to the driver; never waits."""
    if reports.is_owner():
        reports.local_value().put(minibatch, loss)
    else:
        on(reports).rpc_async(LossQueue.put, minibatch, loss)
