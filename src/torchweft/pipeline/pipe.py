"""The driver's side of a pipeline."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchweft import checkpoint as snapshots
from torchweft.arguments import check_callable, check_choice, limit_of, wrong_type
from torchweft.closing import Closing
from torchweft.errors import ConfigurationError
from torchweft.extending import this_worker
from torchweft.optim.clipping import check_norms, coefficient_of, norm_of
from torchweft.optim.states import Moved
from torchweft.pipeline.copies import Tie
from torchweft.pipeline.cutting import Stages, StageSource, check_stages, stages_of
from torchweft.pipeline.deployment import Deployment, Schedules, check_same, lay_out
from torchweft.pipeline.groups import PipeGroup
from torchweft.pipeline.host import Form, Host
from torchweft.pipeline.minibatches import AsynchronousRun
from torchweft.pipeline.optimizer import PipeOptimizer, SavedGroups
from torchweft.pipeline.recording import Recording, WorkerNotes
from torchweft.pipeline.runner import WAIT_S, OptimizerMaker, Settings
from torchweft.pipeline.schedules import Table
from torchweft.pipeline.step import (
    Dropping,
    PassedWeights,
    RepeatedTensors,
    check_untrained,
    cut_batch,
    joined,
)
from torchweft.pipeline.wiring import Wiring
from torchweft.rpc import UNSET_RPC_TIMEOUT

_ON_WORKERS = "pass a function or class, which is called on workers"


class Pipe(Closing):
    """A model in stages on several workers, which work on different micro-batches at a time.

    The process that makes it is its driver, and may be one of the workers. Activations and
    gradients go from stage to stage; the driver sends batches and gets losses. Not thread-safe.

    Args:
        stages: A ``Sequential``, which is cut so that the largest stage is as small as possible;
            ``Stages`` from ``cut_model`` or ``cut_sequential``; or one module for each stage, or a
            function that makes it on its worker. A stage's tuple becomes the next one's positional
            arguments, and its dict keyword arguments; layers of a ``Sequential`` get one argument
            as usual.
        workers: Names of the workers, in the order of the schedule's rows.
        schedule: When which stage runs which micro-batch.
        loss: Called by the worker of the last stage with an output and a target; returns the mean
            loss of a micro-batch. Needed for ``step`` and ``run``.
        wiring: Which values each stage takes, if the stages are no chain.
        ties: Weights that several stages share and that cannot be found: those of stages that are
            made on their workers. Each is a stage and a name: ``((0, "weight"), (3, "weight"))``.
        checkpoint: Whether activations are dropped after the forward and computed again before the
            backward: for no micro-batch, for all, or for all but the last.
        reduction: Whether the loss of a batch is the mean or the sum of its micro-batches' losses.
        timeout: Seconds that a stage waits for one value of another stage; 60 by default, 0 for
            ever. Workers have at least 60 to set up their stages, and to read or write their state.
        example: A batch; with it, the shapes between the stages are checked before all else.
        optimizer: For an asynchronous schedule: called on each worker with a list of its weights,
            returns the optimizer that ``run`` steps there.
        check_finite: Whether each worker checks what its stages send, the loss and the gradients of
            the weights. The first stage with NaN or an infinity ends the step with ``NotFinite``.

    Raises:
        StageMismatch: With an example, a stage cannot take the values that it gets.
        ArgumentTypeError: An argument is of a wrong type.
        ConfigurationError: The numbers of stages, workers and micro-batches do not fit; or the
            schedule is asynchronous and stages share a weight, or there is no optimizer.
        UnknownWorker: There is no such worker.
        PipelineError: A stage could not be made.

    Example::

        model = nn.Sequential(*layers)
        workers = ["worker1", "worker2"]
        with Pipe(model, workers, Schedule1F1B(8), nn.functional.cross_entropy) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.02)
            for batch, target in data:
                optimizer.zero_grad()
                loss = pipe.step(batch, target)
                optimizer.step()

    Example, asynchronous::

        sgd = functools.partial(torch.optim.SGD, lr=0.02)
        schedule = SchedulePipeDream(weights="stashing")
        with Pipe(model, workers, schedule, nn.functional.cross_entropy, optimizer=sgd) as pipe:
            for loss in pipe.run(data):
                print(loss.item())
    """

    def __init__(
        self,
        stages: nn.Sequential | Stages | Sequence[StageSource],
        workers: Sequence[str],
        schedule: Schedules,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        wiring: Wiring | None = None,
        ties: Iterable[Tie] = (),
        checkpoint: Literal["never", "except_last", "always"] = "never",
        reduction: Literal["mean", "sum"] = "mean",
        timeout: float = UNSET_RPC_TIMEOUT,
        example: Any = None,
        optimizer: OptimizerMaker | None = None,
        check_finite: bool = False,
    ) -> None:
        check_choice("checkpoint", checkpoint, ("never", "except_last", "always"))
        check_choice("reduction", reduction, ("mean", "sum"))
        check_callable("loss", loss, _ON_WORKERS)
        check_callable("optimizer", optimizer, _ON_WORKERS)
        limit_s = limit_of(timeout, WAIT_S)
        self._settings = Settings(
            loss, checkpoint, reduction == "mean", limit_s, optimizer, check_finite
        )
        self._schedule = schedule
        self._mode: bool | None = None
        self._is_recorded = self._is_running = False
        self._dropping = Dropping()
        self._batches, self._targets = RepeatedTensors("the batch"), RepeatedTensors("the target")
        self._passed = PassedWeights()
        self._losses: weakref.ref[Generator[Tensor, None, None]] | None = None
        self._optimizer: PipeOptimizer | None = None
        self._moved = Moved(
            "the workers of a pipeline have copies of its weights: step the optimizer that "
            "pipe.optimizer(torch.optim.SGD, lr=...) returns (an asynchronous schedule takes "
            "Pipe(..., optimizer=)), clip gradients by pipe.clip_grad_norm_(max_norm), and read "
            "the weights by pipe.state_dict()"
        )
        self._deployment = self._deploy(stages, workers, schedule, wiring, ties, example)

    def _deploy(
        self,
        stages: nn.Sequential | Stages | Sequence[StageSource],
        workers: Sequence[str],
        schedule: Schedules,
        wiring: Wiring | None,
        ties: Iterable[Tie],
        example: Any,
    ) -> Deployment:
        names, table, endless = lay_out(workers, schedule)
        found = stages_of(stages, table.n_stages, wiring, ties)
        if example is not None:
            check_stages(found, example, table.n_microbatches)
        deployment = Deployment(names, table, endless, found, self._settings)
        modules = [each for each in found.sources if isinstance(each, nn.Module)]
        weights = [weight for each in modules for weight in each.parameters()]
        self._moved.add(weights)
        self._passed.add(weights)
        return deployment

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers, in the order of the table's rows."""
        return self._deployment.workers

    @property
    def table(self) -> Table:
        """The table that the workers run; of an asynchronous schedule a short one."""
        return self._deployment.table

    @property
    def stages(self) -> Stages:
        """The stages, as they were passed."""
        return self._deployment.stages

    # Training

    def step(self, batch: Any, target: Any) -> Tensor:
        """Runs forward and backward of one batch; gradients are added to ``grad`` of the weights.

        Blocks until all workers are done.

        Args:
            batch: A tensor, or a tuple, list or dict of tensors, with the samples along dimension
                0; cut evenly into the schedule's micro-batches. Other objects go to each of them,
                and tensors that are marked by ``broadcast``.
            target: The same for the loss function; cut in the same way.

        Returns:
            The loss, a tensor without dimensions: the mean or the sum over the micro-batches.

        Raises:
            ConfigurationError: The batch cannot be cut evenly, a tensor of it requires grad, the
                pipeline has no loss, or its schedule is asynchronous.
            PipelineError: A stage failed; names it. The cause is its error.
            NotFinite: With ``check_finite``, values became NaN or infinite.
            WorkerLost: A worker was lost; the pipeline cannot go on.
        """
        self._batches.warn_once(batch)
        self._targets.warn_once(target)
        return self.step_as_given(batch, target)

    def step_as_given(self, batch: Any, target: Any) -> Tensor:
        """Does what ``step`` does, and does not look for tensors that are no samples."""
        self._check_loss()
        self._check_synchronous("step")
        self._check_idle()
        check_untrained(batch, "the batch")
        check_untrained(target, "the target")
        self._passed.warn_of_changes()
        count = self.table.n_microbatches
        batches, targets = cut_batch(batch, count), cut_batch(target, count, "the target")
        zero_grad = self._dropping.take()
        try:
            losses = self._deployment.steps.run(True, zero_grad, batches, targets)
        except BaseException:
            self._dropping.want(zero_grad)
            raise
        return torch.cat(losses).sum()

    def run(self, batches: Iterable[Any]) -> Iterator[Tensor]:
        """Trains on minibatches with an asynchronous schedule; yields their losses in order.

        The pipeline stays full: minibatches enter before the losses of earlier ones are taken. The
        workers step their optimizers. At the end of the minibatches, those under way are finished;
        the weights are then the newest. ``next`` takes minibatches from ``batches`` and blocks
        until the next loss is there.

        To close the iterator before its end, or to drop it, ends the run: minibatches under way
        are dropped, and the stages have taken in different numbers of them. So does an error. The
        pipeline can be used again; until the run has ended it cannot.

        Args:
            batches: Pairs of a batch and a target, as for ``step``, of any number. They are not
                cut. Their tensors must not change until the run has ended.

        Raises:
            ConfigurationError: The schedule is synchronous, the pipeline has no loss, or another
                run is under way.
            ArgumentTypeError: ``batches`` cannot be iterated over, or a minibatch is no pair.
            PipelineError: A stage failed; names it. The cause is its error.
            WorkerLost: A worker was lost; the pipeline cannot go on.
        """
        self._check_loss()
        if not self._deployment.endless:
            raise ConfigurationError(
                f"{self.table.name} is a synchronous schedule; call step(batch, target) for each "
                "batch, or pass SchedulePipeDream"
            )
        try:
            source = iter(batches)
        except TypeError:
            raise wrong_type("batches", batches, "pass pairs of a batch and a target") from None
        losses = self._stream(source)
        self._losses = weakref.ref(losses)
        return losses

    def _stream(self, source: Iterator[Any]) -> Generator[Tensor, None, None]:
        self._check_idle()
        placed = self._deployment
        placed.steps.number += 1
        self._is_running = True
        wiring, limit_s = self.stages.wiring, self._settings.limit_s
        hosts = placed.steps.open_hosts()
        run = AsynchronousRun(placed.steps.number, hosts, self.table, wiring, limit_s)
        try:
            yield from run.losses(source)
        finally:
            self._is_running = False

    def _check_loss(self) -> None:
        if self._settings.loss is None:
            raise ConfigurationError("the pipeline has no loss function; pass loss=... to Pipe")

    def _check_synchronous(self, name: str) -> None:
        if self._deployment.endless:
            raise ConfigurationError(
                f"{name} is for synchronous schedules, and the workers of {self.table.name} step "
                "their optimizers themselves; use: for loss in pipe.run(batches)"
            )

    def _check_idle(self) -> None:
        if self._is_running:
            raise ConfigurationError(
                "a run of this pipeline is under way, and its weights may be changing; take all "
                "losses of its iterator, or close it"
            )

    def __call__(self, batch: Any) -> Any:
        """Runs a forward of one batch without gradients; returns the output of the last stage.

        The outputs of the micro-batches are joined along dimension 0. Blocks.
        """
        self._check_idle()
        batches = cut_batch(batch, self.table.n_microbatches)
        results = self._deployment.steps.run(False, None, batches, [])
        parts = sorted(pair for pair in itertools.chain(*results))
        return joined([output for _, output in parts])

    # Weights

    def optimizer(
        self, optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> PipeOptimizer:
        """Makes an optimizer for the weights of each worker; it replaces an earlier one.

        Args:
            optimizer_class: Called on each worker with a list of its weights and ``options``; also
                a function, which may make several parameter groups of the weights that it gets.
            options: Keyword arguments of the optimizer.

        Raises:
            ArgumentTypeError: ``optimizer_class`` cannot be called, or returns no optimizer.
            ConfigurationError: The schedule is asynchronous; or the optimizer needs a closure, or
                steps other tensors.
        """
        self._check_synchronous("optimizer")
        self._check_idle()
        if not callable(optimizer_class):
            raise wrong_type("optimizer_class", optimizer_class, "pass a class of torch.optim")
        if self._optimizer is not None:
            self._optimizer.replace()
        self._optimizer = None
        self._optimizer = PipeOptimizer(
            lambda: self._deployment, self._dropping, optimizer_class, options
        )
        return self._optimizer

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales all gradients so that their joint norm is at most ``max_norm``. Blocks.

        Weights that exist more than once count once. A norm that is not finite scales all gradients
        as that of ``torch.nn.utils.clip_grad_norm_`` does: to zeros or NaN.

        Args:
            max_norm: The largest norm.
            norm_type: The p of the p-norm; ``math.inf`` for the largest absolute value.
            error_if_nonfinite: Whether to raise if the norm is infinite or NaN.

        Returns:
            The norm over all stages before it, a float64 tensor without dimensions; 0 without
            gradients.

        Raises:
            ConfigurationError: The schedule is asynchronous, ``max_norm`` is no number of at least
                0, or ``norm_type`` none greater than 0.
            OptimizerError: The norm is not finite, and that is an error. Nothing was scaled.
        """
        self._check_synchronous("clip_grad_norm_")
        max_norm, norm_type = check_norms(max_norm, norm_type)
        self._drop_now()
        norm = norm_of(torch.cat(self._all(Host.norms, norm_type)).unbind(), norm_type).double()
        factor = coefficient_of(norm, max_norm, error_if_nonfinite=error_if_nonfinite)
        if factor is not None:
            self._all(Host.scale_gradients, float(factor))
        return norm

    def _drop_now(self) -> None:
        """Drops the gradients before they are looked at, if that is due."""
        set_to_none = self._dropping.take()
        if set_to_none is not None:
            self._all(Host.zero_grad, set_to_none)

    def train(self, mode: bool = True) -> Pipe:
        """Sets the training mode of all stages; returns the pipeline."""
        self._all(Host.set_mode, mode)
        self._mode = mode
        return self

    def eval(self) -> Pipe:
        """Sets the evaluation mode of all stages; returns the pipeline."""
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the weights and buffers of all stages, copied to the driver.

        The keys are those of the model that was cut; otherwise each has the number of its
        stage in front. Of replicas it returns the first, whose weights are those of all; the
        statistics of a batch normalization follow only the micro-batches of that replica.
        """
        self._check_idle()
        return self._deployment.gathered(Host.values)

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients of all weights, copied to the driver; keys as in ``state_dict``."""
        self._check_idle()
        self._drop_now()
        return self._deployment.gathered(Host.gradients)

    def squared_norms(self) -> dict[str, float]:
        """Returns the squared norm of each weight's gradient; keys as in ``state_dict``."""
        self._check_idle()
        self._drop_now()
        return self._deployment.gathered(Host.squared_norms)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Sets the weights and buffers of all stages.

        Raises:
            ConfigurationError: Keys are missing, or there are others; or a value is of another
                shape or type.
        """
        self._check_idle()
        placed = self._deployment
        given = {name: Form.of(value) for name, value in state.items()}
        check_same(given, placed.forms())
        placed.call_all(Host.set_values, dict(state))

    # Moving and saving

    def repartition(
        self,
        stages: nn.Sequential | Stages | Sequence[StageSource],
        *,
        workers: Sequence[str] | None = None,
        schedule: Schedules | None = None,
        wiring: Wiring | None = None,
        ties: Iterable[Tie] = (),
        example: Any = None,
    ) -> None:
        """Cuts the model in another way, or moves it to other workers, between two steps. Blocks.

        The stages that are passed say which modules they have, and which of their weights are
        trained. Their values come from the present stages, by name: weights, buffers, and the
        optimizer's state go from worker to worker. The optimizer and its hyper-parameters stay
        valid; gradients are dropped. If it fails, the pipeline is as before.

        Args:
            stages: The same model in other stages; see ``Pipe``. The names of weights must be the
                same, so use ``cut_sequential``, ``cut_model`` or a ``Sequential``.
            workers: The workers; by default the present ones.
            schedule: The schedule; by default the present one; asynchronous only if that is.
            wiring: See ``Pipe``.
            ties: See ``Pipe``.
            example: See ``Pipe``.

        Raises:
            ConfigurationError: A run is under way, the pipeline is recorded, the stages are of
                another model, or they do not fit the schedule.
            WorkerLost: A worker was lost.
        """
        if self._optimizer is not None:
            self._optimizer.follow()
        old, workers = self._deployment, workers or self.workers
        with self._replaced(stages, workers, schedule, wiring, ties, example) as (new, groups):
            new.move_from(old)
            if self._optimizer is not None and groups is not None:
                self._optimizer.adopt(groups)

    def resume(
        self,
        directory: str | os.PathLike[str],
        stages: nn.Sequential | Stages | Sequence[StageSource],
        workers: Sequence[str],
        *,
        schedule: Schedules | None = None,
        wiring: Wiring | None = None,
        ties: Iterable[Tie] = (),
        state: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> snapshots.Snapshot:
        """Goes on from a snapshot on other workers, after a worker was lost. Blocks.

        It is ``repartition`` with the state of a snapshot in place of that of the present stages;
        the optimizer stays valid.

        Args:
            directory: Where ``save`` saved; see ``restore``.
            stages: The same model in other stages; see ``repartition``.
            workers: The workers.
            schedule: See ``repartition``.
            wiring: See ``Pipe``.
            ties: See ``Pipe``.
            state: See ``restore``.
            step: See ``restore``.

        Raises:
            ConfigurationError: As for ``repartition``.
            SnapshotNotFound: There is none.
            StateMismatch: It is of another model.
            WorkerLost: Another worker was lost.
        """
        with self._replaced(stages, workers, schedule, wiring, ties, None) as (new, groups):
            return self._restored(new, directory, state, step, groups)

    @contextlib.contextmanager
    def _replaced(
        self,
        stages: nn.Sequential | Stages | Sequence[StageSource],
        workers: Sequence[str],
        schedule: Schedules | None,
        *given: Any,
    ) -> Iterator[tuple[Deployment, list[PipeGroup] | None]]:
        """Yields other stages, and the groups of the optimizer there, to be given their state.

        They then take the place of the present stages, unless that fails.
        """
        self._check_idle()
        if self._is_recorded:
            raise ConfigurationError("the pipeline is recorded; leave that block first")
        old, schedule = self._deployment, schedule or self._schedule
        new = self._deploy(stages, workers, schedule, *given)
        try:
            groups = None if self._optimizer is None else self._optimizer.move(new)
            if self._mode is not None:
                new.call_all(Host.set_mode, self._mode)
            yield new, groups
        except BaseException:
            new.close()
            raise
        self._deployment, self._schedule = new, schedule
        old.close()

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        state: dict[str, Any] | None = None,
        keep: int | None = None,
    ) -> snapshots.Snapshot:
        """Saves weights, buffers, optimizer and random numbers, between two steps. Blocks.

        Each worker writes the state of its own stages. See ``torchweft.checkpoint.save``.

        Args:
            directory: Where snapshots are kept.
            step: How many steps have been done.
            state: Further state of the program; see ``torchweft.checkpoint.save``.
            keep: How many snapshots to keep; None for all.

        Raises:
            CheckpointError: A worker could not write its part.
            WorkerLost: A worker was lost. Earlier snapshots are unchanged.
        """
        self._check_idle()
        groups = None if self._optimizer is None else self._optimizer.follow()
        tree, _ = _tree(self._deployment, groups, state)
        random_of = {*self.workers, this_worker().name}
        return snapshots.save(directory, tree, step=step, keep=keep, random_states=random_of)

    def restore(
        self,
        directory: str | os.PathLike[str],
        *,
        state: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> snapshots.Snapshot:
        """Restores what ``save`` saved, also with other stages or on other workers. Blocks.

        The model must be cut from the same one, so that names are the same, and have an optimizer
        if it had one.

        Args:
            directory: Where the snapshots are.
            state: Further state of the program, as it was saved; it is changed in place.
            step: The snapshot after this many steps; by default the last snapshot.

        Raises:
            SnapshotNotFound: There is none.
            StateMismatch: It is of another model; lists the differences. Nothing is changed.
            WorkerLost: A worker was lost.
        """
        self._check_idle()
        groups = None if self._optimizer is None else self._optimizer.groups()
        return self._restored(self._deployment, directory, state, step, groups)

    def _restored(
        self,
        deployment: Deployment,
        directory: str | os.PathLike[str],
        state: dict[str, Any] | None,
        step: int | None,
        groups: list[PipeGroup] | None,
    ) -> snapshots.Snapshot:
        tree, saved = _tree(deployment, groups, state)
        snapshot = snapshots.restore(directory, tree, step=step)
        deployment.spread()
        if self._optimizer is not None:
            self._optimizer.restore(deployment, saved.groups)
        return snapshot

    # Measuring

    def peak_held(self) -> list[int]:
        """Returns the most micro-batches whose activations each worker held in the last step.

        With an asynchronous schedule, minibatches in the last run.
        """
        return self._all(Host.peak_held)

    def recording(self) -> Recording:
        """Measures when each action of the training steps in a ``with`` block runs.

        Workers note two times for each action meanwhile, and none otherwise. Steps that fail, and
        evaluation, are left out; so are runs that were not taken to their end. A worker on another
        host has another clock, which is read through a call when the block ends;
        ``clock_error_s`` bounds the error.

        Example::

            with pipe.recording() as recording:
                for batch, target in data:
                    pipe.step(batch, target)
            print(recording.report())
            Path("timeline.svg").write_text(recording.timeline.svg(recording.predicted))
        """
        endless, count = self._deployment.endless, len(self.workers)
        return Recording(
            lambda n: endless.table(count, n) if endless else self.table,
            self.stages.wiring.edges,
            self._deployment.infos,
            self._start_recording,
            self._stop_recording,
        )

    def _start_recording(self) -> None:
        if self._is_recorded:
            raise ConfigurationError("the pipeline is recorded already; leave that block first")
        self._all(Host.start_recording)
        self._is_recorded = True

    def _stop_recording(self) -> list[WorkerNotes]:
        self._is_recorded = False
        return self._all(Host.stop_recording)

    def versions_held(self) -> list[int]:
        """Returns the most versions of its weights that each worker held at once in the last run.

        The newest version counts. With a synchronous schedule it is the only one.
        """
        return self._all(Host.versions_held)

    def _all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a method of all hosts; returns the results by row."""
        self._check_idle()
        return self._deployment.call_all(method, *args)

    # The end

    def close(self) -> None:
        """Ends the pipeline on all workers, and releases its stages; passes over lost workers.

        Ends a run that is under way.
        """
        losses = self._losses() if self._losses else None
        if losses is not None:
            losses.close()
        self._moved.close()
        self._deployment.close()


def _tree(
    deployment: Deployment, groups: list[PipeGroup] | None, state: dict[str, Any] | None
) -> tuple[dict[str, Any], SavedGroups]:
    """Returns all that a snapshot holds; and of that, the optimizer's groups.

    Args:
        deployment: The stages.
        groups: The groups of the optimizer; None if there is none.
        state: Further state of the program.
    """
    saved = SavedGroups(groups or [])
    found: dict[str, Any] = {"pipe": deployment.references()}
    if groups is not None:
        found["groups"] = saved
    return {**found, "program": {} if state is None else state}, saved
