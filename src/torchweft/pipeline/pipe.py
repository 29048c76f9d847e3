"""The driver's side of a pipeline."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from torchweft.agent.current import current
from torchweft.arguments import limit_of
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.pipeline import host, stream_host
from torchweft.pipeline.checking import check_stages
from torchweft.pipeline.copies import Copies, Tie, find_copies
from torchweft.pipeline.cutting import Stages, StageSource, stages_of
from torchweft.pipeline.recording import Recording, WorkerNotes
from torchweft.pipeline.runner import Assignment
from torchweft.pipeline.schedules import SchedulePipeDream, Table, check
from torchweft.pipeline.streaming import (
    OptimizerMaker,
    Run,
    blame,
    check_endless,
    check_updates,
    iterator_of,
    short_table,
)
from torchweft.pipeline.values import cut_batch, picked_for
from torchweft.pipeline.wiring import BATCH, Wiring
from torchweft.rpc import (
    UNSET_RPC_TIMEOUT,
    Future,
    RRef,
    as_completed,
    get_worker_info,
    rpc_async,
    rpc_sync,
)

_WAIT_S = 60.0
_END_S = 5.0
_numbers = itertools.count(1)


class Schedules(Protocol):
    """Anything that has a table for a number of workers."""

    def table(self, n_workers: int, /) -> Table:
        """Returns the table."""


class Pipe:
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
        timeout: Seconds that a stage waits for one value of another stage.
        example: A batch; with it, the shapes between the stages are checked before all else.
        optimizer: For an asynchronous schedule: called on each worker with a list of its weights,
            returns the optimizer that ``run`` steps there.

    Raises:
        StageMismatch: With an example, a stage cannot take the values that it gets.
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
    ) -> None:
        _check_choice("checkpoint", checkpoint, ("never", "except_last", "always"))
        _check_choice("reduction", reduction, ("mean", "sum"))
        self.workers = tuple(workers)
        if len(set(self.workers)) != len(self.workers) or not self.workers:
            raise ConfigurationError(
                f"workers is {list(workers)}; name each worker of the pipeline once"
            )
        self._endless = schedule if isinstance(schedule, SchedulePipeDream) else None
        count = len(self.workers)
        self.table = short_table(self._endless, count) if self._endless else schedule.table(count)
        check_updates(self.table, bool(self._endless), optimizer)
        self.stages = stages_of(stages, self.table.n_stages, wiring, ties)
        check(self.table, self.stages.wiring.edges)
        if example is not None:
            check_stages(self.stages, example, self.table.n_microbatches)
        if self._endless:
            check_endless(self._endless, count, self.stages, checkpoint)
        self._infos = [get_worker_info(name) for name in self.workers]
        self._limit_s = limit_of(timeout, _WAIT_S)
        self._mean = reduction == "mean"
        self._has_loss = loss is not None
        self._step = 0
        self._zero_grad = self._is_recorded = False
        self._inputs = self._input_stages()
        self._last = self.table.n_stages - 1
        self._pipe = (current().me.id << 32) | next(_numbers)
        self._hosts: list[RRef[host.Host]] = []
        self._is_running = False
        self._losses: weakref.ref[Generator[Tensor, None, None]] | None = None
        self._set_up(loss, checkpoint)
        if optimizer is not None:
            self._all(host.make_optimizer, optimizer, {})

    def _input_stages(self) -> list[list[int]]:
        """Returns, for each worker, its stages that take a part of the batch."""
        wiring = self.stages.wiring
        return [
            [stage for stage in self.table.stages_of(row) if wiring.taken(stage, BATCH)]
            for row in range(len(self.workers))
        ]

    def _set_up(self, loss: Callable[[Any, Any], Tensor] | None, checkpoint: str) -> None:
        copies = find_copies(self.table, self.stages.ties)
        futures: list[Future[RRef[host.Host]]] = []
        for row, info in enumerate(self._infos):
            sources = {stage: self.stages.sources[stage] for stage in self.table.stages_of(row)}
            if info.name == current().me.name:
                sources = copy.deepcopy(sources)  # Another worker gets copies as well.
            given = (
                self._pipe,
                row,
                self.workers,
                self.table,
                self.stages.wiring,
                sources,
                loss,
                self.table.n_microbatches if self._mean and not self._endless else 1,
                checkpoint,
                copies,
                self._limit_s,
                current().me.name,
            )
            if self._endless:
                streamed = stream_host.StreamAssignment(*given, self._endless, self._mean)
                future = rpc_async(
                    info, stream_host.set_up, args=(streamed,), timeout=self._limit_s
                )
            else:
                assignment = Assignment(*given)
                future = rpc_async(info, host.set_up, args=(assignment,), timeout=self._limit_s)
            futures.append(future)
        self._hosts = [future.wait() for future in futures]
        self._equalize(copies)

    def _equalize(self, copies: Copies) -> None:
        """Gives all copies of a weight the value of the first, where each worker made its own."""
        for number, members in enumerate(copies.groups):
            made = [self.stages.sources[member.stage] for member in members]
            if all(isinstance(each, nn.Module) for each in made):
                continue
            first, *others = copies.workers(number)
            args = (self._pipe, number)
            values = rpc_sync(self._infos[first], host.first_values, args=args)
            for worker in (first, *others):
                rpc_sync(self._infos[worker], host.set_values, args=(*args, values))

    # Training

    def step(self, batch: Any, target: Any) -> Tensor:
        """Runs forward and backward of one batch; gradients are added to ``grad`` of the weights.

        Blocks until all workers are done.

        Args:
            batch: A tensor, or a tuple, list or dict of tensors, with the samples along dimension
                0; cut evenly into the schedule's micro-batches. Other objects go to each of them.
            target: The same for the loss function; cut in the same way.

        Returns:
            The loss, a tensor without dimensions: the mean or the sum over the micro-batches.

        Raises:
            ConfigurationError: The batch cannot be cut evenly, the pipeline has no loss, or its
                schedule is asynchronous.
            PipelineError: A stage failed; names it. The cause is its error.
            WorkerLost: A worker was lost; the pipeline cannot go on.
        """
        self._check_loss()
        self._check_synchronous("step")
        return torch.cat(self._run_once(True, batch, target)).sum()

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
        if not self._endless:
            raise ConfigurationError(
                f"{self.table.name} is a synchronous schedule; call step(batch, target) for each "
                "batch, or pass SchedulePipeDream"
            )
        losses = self._stream(iterator_of(batches))
        self._losses = weakref.ref(losses)
        return losses

    def _stream(self, source: Iterator[Any]) -> Generator[Tensor, None, None]:
        self._check_idle()
        self._step += 1
        self._is_running = True
        wiring = self.stages.wiring
        run = Run(self._pipe, self._step, self._infos, self.table, wiring, self._limit_s)
        try:
            yield from run.losses(source)
        finally:
            self._is_running = False

    def _check_loss(self) -> None:
        if not self._has_loss:
            raise ConfigurationError("the pipeline has no loss function; pass loss=... to Pipe")

    def _check_synchronous(self, name: str) -> None:
        if self._endless:
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
        results = self._run_once(False, batch, None)
        parts = sorted(pair for pair in itertools.chain(*results))
        return _joined([output for _, output in parts])

    def _run_once(self, is_training: bool, batch: Any, target: Any) -> list[Any]:
        """Runs all rows once; returns the results of the workers that have one."""
        self._check_idle()
        count = self.table.n_microbatches
        batches = cut_batch(batch, count)
        targets = cut_batch(target, count, "the target") if is_training else []
        self._step += 1
        zero_grad, self._zero_grad = self._zero_grad and is_training, False
        futures: list[Future[Any]] = []
        failures: list[Exception] = []
        for row, info in enumerate(self._infos):
            inputs = {
                stage: {
                    number: picked_for(stage, self.stages.wiring, part)
                    for number, part in enumerate(batches)
                    if self.table.worker_of(stage, number) == row
                }
                for stage in self._inputs[row]
            }
            own_targets = {
                number: part
                for number, part in enumerate(targets)
                if self.table.worker_of(self._last, number) == row
            }
            args = (self._pipe, self._step, is_training, zero_grad, inputs, own_targets)
            try:
                futures.append(rpc_async(info, host.start, args=args, timeout=0))
            except Exception as error:
                failures.append(error)
                self._abort()
                break
        return [result for result in self._results(futures, failures) if result is not None]

    def _results(self, futures: list[Future[Any]], failures: list[Exception]) -> list[Any]:
        """Waits for all workers; if one fails, ends the step on the others and raises its error."""
        try:
            for future in as_completed(futures):
                try:
                    future.wait()
                except Exception as error:
                    if not failures:
                        self._abort()
                    failures.append(error)
        except BaseException:  # Ctrl-C
            self._abort()
            _cancel(futures)
            raise
        if not failures:
            return [future.wait() for future in futures]
        # The others failed because of the first, unless it was told to end by one of them.
        failures.sort(key=blame)
        raise failures[0]

    def _abort(self) -> None:
        for info in self._infos:
            try:
                rpc_async(info, host.abort, args=(self._pipe, self._step), timeout=_END_S)
            except WorkerLost:
                continue

    # Weights

    def optimizer(
        self, optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> PipeOptimizer:
        """Makes an optimizer for the weights of each worker.

        Args:
            optimizer_class: Called on each worker with its weights and ``options``.
            options: Keyword arguments of the optimizer.

        Raises:
            ConfigurationError: The schedule is asynchronous.
        """
        self._check_synchronous("optimizer")
        self._all(host.make_optimizer, optimizer_class, options)
        return PipeOptimizer(self)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their joint norm is at most ``max_norm``.

        Weights that exist more than once count once.

        Returns:
            The norm over all stages before it, a float64 tensor without dimensions.

        Raises:
            ConfigurationError: The schedule is asynchronous.
        """
        self._check_synchronous("clip_grad_norm_")
        norm = torch.stack(self._all(host.squared_norm)).sum().sqrt()
        self._all(host.scale_gradients, min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def train(self, mode: bool = True) -> Pipe:
        """Sets the training mode of all stages; returns the pipeline."""
        self._all(host.set_mode, mode)
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
        return self._gathered(host.state_dict)

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients of all weights, copied to the driver; keys as in ``state_dict``."""
        return self._gathered(host.gradients)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Sets the weights and buffers of all stages.

        Raises:
            ConfigurationError: Keys are missing, or there are others.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ConfigurationError(
                f"the state is of another model: missing {missing}, unexpected {extra}"
            )
        self._all(host.load_state_dict, dict(state), self.stages.has_names)

    def peak_held(self) -> list[int]:
        """Returns the most micro-batches whose activations each worker held in the last step.

        With an asynchronous schedule, minibatches in the last run.
        """
        return self._all(host.peak_held)

    def recording(self) -> Recording:
        """Measures when each action of the training steps in a ``with`` block runs.

        Workers note two times for each action meanwhile, and none otherwise. Steps that fail, and
        evaluation, are left out. A worker on another host has another clock, which is read through
        a call when the block ends; ``clock_error_s`` bounds the error.

        Example::

            with pipe.recording() as recording:
                for batch, target in data:
                    pipe.step(batch, target)
            print(recording.report())
            Path("timeline.svg").write_text(recording.timeline.svg(recording.predicted))
        """
        return Recording(
            self.table,
            self.stages.wiring.edges,
            self._infos,
            self._start_recording,
            self._stop_recording,
        )

    def _start_recording(self) -> None:
        if self._is_recorded:
            raise ConfigurationError("the pipeline is recorded already; leave that block first")
        self._all(host.start_recording)
        self._is_recorded = True

    def _stop_recording(self) -> list[WorkerNotes]:
        self._is_recorded = False
        return self._all(host.stop_recording)

    def versions_held(self) -> list[int]:
        """Returns the most versions of its weights that each worker held at once in the last run.

        The newest version counts. With a synchronous schedule it is the only one.
        """
        return self._all(stream_host.versions_held) if self._endless else [1] * len(self.workers)

    def _gathered(self, function: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        gathered: dict[str, Any] = {}
        for each in self._all(function, self.stages.has_names):
            gathered |= each | gathered  # Of replicas, the first.
        return gathered

    def _all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function of the host on all workers; returns the results by row."""
        self._check_idle()
        futures = [
            rpc_async(info, function, args=(self._pipe, *args), timeout=self._limit_s)
            for info in self._infos
        ]
        try:
            return [future.wait() for future in futures]
        except BaseException:  # One failed, or Ctrl-C
            _cancel(futures)
            raise

    # The end

    def close(self) -> None:
        """Ends the pipeline on all workers, and releases its stages; passes over lost workers.

        Ends a run that is under way.
        """
        losses = self._losses() if self._losses else None
        if losses is not None:
            losses.close()
        for info in self._infos if self._hosts else ():
            try:
                rpc_sync(info, host.close, args=(self._pipe,), timeout=_END_S)
            except (WorkerLost, TimeoutError):
                continue
        self._hosts.clear()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PipeOptimizer:
    """The optimizers of a pipeline's workers; made by ``Pipe.optimizer``."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def zero_grad(self) -> None:
        """Drops all gradients when the next step of the pipeline begins."""
        self._pipe._zero_grad = True

    def step(self) -> None:
        """Steps the optimizer of each worker; blocks until all are done."""
        self._pipe._all(host.step_optimizer)


def _cancel(futures: Iterable[Future[Any]]) -> None:
    """Gives up calls, so that their later errors are not reported as never looked at."""
    for future in futures:
        future.cancel()


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f"{name} is {value!r}; pass one of {', '.join(map(repr, choices))}"
        )


def _joined(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, dict):
        return {key: _joined([each[key] for each in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(column) for column in zip(*outputs, strict=True))
    return list(outputs)
