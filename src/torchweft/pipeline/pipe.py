"""The driver's side of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from torchweft.agent.current import current
from torchweft.arguments import limit_of
from torchweft.errors import ConfigurationError, PipelineError, WorkerLost
from torchweft.pipeline import host
from torchweft.pipeline.copies import Copies, Tie, find_copies
from torchweft.pipeline.cutting import Stages, StageSource, stages_of
from torchweft.pipeline.recording import Recording, WorkerNotes
from torchweft.pipeline.schedules import Table, check
from torchweft.pipeline.values import cut_batch, pick
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
            ``Stages`` from ``cut_sequential``; or one module for each stage, or one function that
            makes it on its worker. A stage's tuple becomes the next one's positional arguments, and
            its dict keyword arguments; layers of a ``Sequential`` get one argument as usual.
        workers: Names of the workers, in the order of the schedule's rows.
        schedule: When which stage runs which micro-batch.
        loss: Called by the worker of the last stage with an output and a target; returns the mean
            loss of a micro-batch. Needed for ``step``.
        wiring: Which values each stage takes, if the stages are no chain.
        ties: Weights that several stages share and that cannot be found: those of stages that are
            made on their workers. Each is a stage and a name: ``((0, "weight"), (3, "weight"))``.
        checkpoint: Whether activations are dropped after the forward and computed again before the
            backward: for no micro-batch, for all, or for all but the last.
        reduction: Whether the loss of a batch is the mean or the sum of its micro-batches' losses.
        timeout: Seconds that a stage waits for one value of another stage.

    Raises:
        ConfigurationError: The numbers of stages, workers and micro-batches do not fit.
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
    ) -> None:
        _check_choice("checkpoint", checkpoint, ("never", "except_last", "always"))
        _check_choice("reduction", reduction, ("mean", "sum"))
        self.workers = tuple(workers)
        if len(set(self.workers)) != len(self.workers) or not self.workers:
            raise ConfigurationError(
                f"workers is {list(workers)}; name each worker of the pipeline once"
            )
        self.table = schedule.table(len(self.workers))
        self.stages = stages_of(stages, self.table.n_stages, wiring, ties)
        check(self.table, self.stages.wiring.edges)
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
        self._set_up(loss, checkpoint)

    def _input_stages(self) -> list[list[int]]:
        """Returns, for each worker, its stages that take a part of the batch."""
        wiring = self.stages.wiring
        return [
            [stage for stage in self.table.stages_of(row) if wiring.taken(stage, BATCH)]
            for row in range(len(self.workers))
        ]

    def _set_up(self, loss: Callable[[Any, Any], Tensor] | None, checkpoint: str) -> None:
        copies = find_copies(self.table, self.stages.ties)
        futures = [
            rpc_async(
                info,
                host.set_up,
                args=(
                    host.Assignment(
                        self._pipe,
                        row,
                        self.workers,
                        self.table,
                        self.stages.wiring,
                        {stage: self.stages.sources[stage] for stage in self.table.stages_of(row)},
                        loss,
                        self.table.n_microbatches if self._mean else 1,
                        checkpoint,
                        copies,
                        self._limit_s,
                    ),
                ),
                timeout=self._limit_s,
            )
            for row, info in enumerate(self._infos)
        ]
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
            ConfigurationError: The batch cannot be cut evenly, or the pipeline has no loss.
            PipelineError: A stage failed; names it. The cause is its error.
            WorkerLost: A worker was lost; the pipeline cannot go on.
        """
        if not self._has_loss:
            raise ConfigurationError("the pipeline has no loss function; pass loss=... to Pipe")
        return torch.cat(self._run(True, batch, target)).sum()

    def __call__(self, batch: Any) -> Any:
        """Runs a forward of one batch without gradients; returns the output of the last stage.

        The outputs of the micro-batches are joined along dimension 0. Blocks.
        """
        results = self._run(False, batch, None)
        parts = sorted(pair for pair in itertools.chain(*results))
        return _joined([output for _, output in parts])

    def _run(self, is_training: bool, batch: Any, target: Any) -> list[Any]:
        """Runs all rows once; returns the results of the workers that have one."""
        count = self.table.n_microbatches
        batches = cut_batch(batch, count)
        targets = cut_batch(target, count, "the target") if is_training else ()
        self._step += 1
        zero_grad, self._zero_grad = self._zero_grad and is_training, False
        takes = self.stages.wiring.takes
        futures: list[Future[Any]] = []
        for row, info in enumerate(self._infos):
            inputs = {
                stage: [
                    [pick(part, take, stage) for take in takes[stage] if take.source == BATCH]
                    for part in batches
                ]
                for stage in self._inputs[row]
            }
            own_targets = targets if self._last in self.table.stages_of(row) else ()
            args = (self._pipe, self._step, is_training, zero_grad, inputs, own_targets)
            futures.append(rpc_async(info, host.start, args=args, timeout=0))
        return [result for result in self._results(futures) if result is not None]

    def _results(self, futures: list[Future[Any]]) -> list[Any]:
        """Waits for all workers; if one fails, ends the step on the others and raises its error."""
        failures: list[Exception] = []
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
        failures.sort(key=_blame)
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
        """
        self._all(host.make_optimizer, optimizer_class, options)
        return PipeOptimizer(self)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their joint norm is at most ``max_norm``.

        Weights that exist more than once count once.

        Returns:
            The norm over all stages before it, a float64 tensor without dimensions.
        """
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

        The keys are those of the ``Sequential`` that was cut; otherwise each has the number of its
        stage in front.
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
        """Returns the most micro-batches whose activations each worker held in the last step."""
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

    def _gathered(self, function: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        gathered: dict[str, Any] = {}
        for each in self._all(function, self.stages.has_names):
            gathered.update(each)
        return gathered

    def _all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function of the host on all workers; returns the results by row."""
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
        """Ends the pipeline on all workers, and releases its stages; passes over lost workers."""
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


def _blame(error: Exception) -> int:
    """Orders the errors of a step: the one that explains the others first."""
    if isinstance(error, WorkerLost):
        return 0
    return 1 if not isinstance(error, PipelineError) or error.stage >= 0 else 2


def _joined(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, dict):
        return {key: _joined([each[key] for each in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(column) for column in zip(*outputs, strict=True))
    return list(outputs)
