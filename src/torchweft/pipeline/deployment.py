"""The stages of a pipeline on their workers, as the driver sees them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from torchweft.arguments import check_workers, wrong_type
from torchweft.engine.worker.current import current
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.free_threading import shared_count
from torchweft.pipeline import host, stepping, stream_host
from torchweft.pipeline.copies import Copies, find_copies
from torchweft.pipeline.cutting import Stages
from torchweft.pipeline.runner import Assignment
from torchweft.pipeline.schedules import SchedulePipeDream, Table, check
from torchweft.pipeline.streaming import (
    OptimizerMaker,
    blame,
    check_endless,
    check_updates,
    short_table,
)
from torchweft.pipeline.values import cut_batch, picked_for
from torchweft.pipeline.weights import Where
from torchweft.pipeline.wiring import BATCH
from torchweft.rpc import Future, RRef, as_completed, get_worker_info, rpc_async, rpc_sync
from torchweft.rpc.futures import ignore_errors

WAIT_S = 60.0
"""How long stages wait for one another by default, and calls of a pipeline at least."""
_END_S = 5.0
_numbers = shared_count(1)


class Schedules(Protocol):
    """Anything that has a table for a number of workers."""

    def table(self, n_workers: int, /) -> Table:
        """Returns the table."""


class Settings(NamedTuple):
    """The settings of a pipeline that do not depend on where its stages are.

    Attributes:
        loss: The loss function.
        checkpoint: When activations are dropped and computed again.
        is_mean: Whether the loss of a batch is the mean over its micro-batches.
        limit_s: How long a stage waits for a value of another stage.
        maker: Makes the optimizers that an asynchronous schedule steps.
        check_finite: Whether stages look for NaN and infinity.
    """

    loss: Callable[[Any, Any], Tensor] | None
    checkpoint: str
    is_mean: bool
    limit_s: float
    maker: OptimizerMaker | None
    check_finite: bool

    @property
    def answer_s(self) -> float:
        """How long to wait for a worker that sets up its stages, or reads or writes their state."""
        return max(self.limit_s, WAIT_S)


class Layout(NamedTuple):
    """Which worker is to hold which stages; made before any worker is called.

    Attributes:
        workers: The names of the workers, by row.
        table: The table; of an asynchronous schedule a short one.
        endless: The schedule, if it is asynchronous.
    """

    workers: tuple[str, ...]
    table: Table
    endless: SchedulePipeDream | None

    @classmethod
    def of(cls, workers: Sequence[str], schedule: Schedules) -> Layout:
        """Returns the layout of a schedule on workers.

        Raises:
            ArgumentTypeError: One of them is of a wrong type.
            ConfigurationError: A worker is named twice, or the schedule cannot have their number.
        """
        check_workers(workers, "workers")
        if isinstance(schedule, type) or not callable(getattr(schedule, "table", None)):
            shown = schedule.__name__ if isinstance(schedule, type) else "Schedule1F1B"
            raise wrong_type("schedule", schedule, f"pass a schedule, such as {shown}(8)")
        names = tuple(workers)
        if len(set(names)) != len(names) or not names:
            raise ConfigurationError(
                f"workers is {list(workers)}; name each worker of the pipeline once"
            )
        if isinstance(schedule, SchedulePipeDream):
            return cls(names, short_table(schedule, len(names)), schedule)
        return cls(names, schedule.table(len(names)), None)


class Deployment:
    """The stages of one pipeline on their workers. Not thread-safe.

    Args:
        layout: Which worker is to hold which stages.
        stages: The stages.
        settings: The settings.

    Raises:
        ConfigurationError: The stages do not fit the layout.
        UnknownWorker: There is no such worker.
        PipelineError: A stage could not be made.

    Attributes:
        number: Identifies it in the group.
        infos: The workers, by row.
        step: Number of the last step or run.
    """

    def __init__(self, layout: Layout, stages: Stages, settings: Settings) -> None:
        self.workers, self.table, self.endless = layout
        self.stages = stages
        check_updates(self.table, bool(self.endless), settings.maker)
        check(self.table, stages.wiring.edges)
        if self.endless:
            check_endless(self.endless, len(self.workers), stages, settings.checkpoint)
        self.infos = [get_worker_info(name) for name in self.workers]
        self.step = 0
        self.number = (current().me.id << 32) | next(_numbers)
        self._settings = settings
        self._inputs = self._input_stages()
        self._last = self.table.n_stages - 1
        self._hosts: list[RRef[host.Host]] = []
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _input_stages(self) -> list[list[int]]:
        """Returns, for each worker, its stages that take a part of the batch."""
        wiring = self.stages.wiring
        return [
            [stage for stage in self.table.stages_of(row) if wiring.taken(stage, BATCH)]
            for row in range(len(self.workers))
        ]

    def _set_up(self) -> None:
        copies = find_copies(self.table, self.stages.ties)
        futures = [self._place(row, copies) for row in range(len(self.workers))]
        try:
            self._hosts = [future.wait() for future in futures]
        except BaseException:
            _cancel(futures)
            raise
        self._equalize(copies)
        if self._settings.maker is not None:
            self.call_named(stepping.make, self._settings.maker, {})

    def _place(self, row: int, copies: Copies) -> Future[RRef[host.Host]]:
        """Has a worker make its stages, and the thread that runs them."""
        info, settings = self.infos[row], self._settings
        sources = {stage: self.stages.sources[stage] for stage in self.table.stages_of(row)}
        if info.name == current().me.name:
            sources = copy.deepcopy(sources)  # Another worker gets copies as well.
        is_divided = settings.is_mean and not self.endless
        given = (
            self.number,
            row,
            self.workers,
            self.table,
            self.stages.wiring,
            sources,
            settings.loss,
            self.table.n_microbatches if is_divided else 1,
            settings.checkpoint,
            copies,
            settings.limit_s,
            current().me.name,
            settings.check_finite,
        )
        if self.endless:
            streamed = stream_host.StreamAssignment(*given, self.endless, settings.is_mean)
            return rpc_async(info, stream_host.set_up, args=(streamed,), timeout=settings.answer_s)
        assignment = Assignment(*given)
        return rpc_async(info, host.set_up, args=(assignment,), timeout=settings.answer_s)

    def _equalize(self, copies: Copies) -> None:
        """Gives all copies of a weight the value of the first, where each worker made its own."""
        for number, members in enumerate(copies.groups):
            made = [self.stages.sources[member.stage] for member in members]
            if all(isinstance(each, nn.Module) for each in made):
                continue
            first, *others = copies.workers(number)
            args = (self.number, number)
            values = rpc_sync(self.infos[first], host.first_values, args=args)
            for worker in (first, *others):
                rpc_sync(self.infos[worker], host.set_values, args=(*args, values))

    # Calls

    @property
    def where(self) -> Where:
        """How functions of ``weights`` find the state of the stages."""
        return Where(self.number, self.stages.has_names)

    def call_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function of ``host`` on all workers; returns the results by row."""
        return self.call_each(function, [(self.number, *args)] * len(self.infos))

    def call_named(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function of ``weights`` on all workers; returns the results by row."""
        return self.call_each(function, [(self.where, *args)] * len(self.infos))

    def gathered(self, function: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Calls a function of ``weights`` on all workers; returns copies of all that they return.

        Of replicas it has the first.
        """
        found: dict[str, Any] = {}
        me = current().me.name
        for worker, each in zip(self.workers, self.call_named(function), strict=True):
            # This process has got what it changes in the next step, and not copies.
            own = copy.deepcopy(each) if worker == me else each
            found |= own | found
        return found

    def call_each(self, function: Callable[..., Any], args: Iterable[Sequence[Any]]) -> list[Any]:
        """Calls a function on all workers, with arguments for each; returns the results by row."""
        limit_s = self._settings.answer_s
        futures = [
            rpc_async(info, function, args=tuple(given), timeout=limit_s)
            for info, given in zip(self.infos, args, strict=True)
        ]
        try:
            return [future.wait() for future in futures]
        except BaseException:  # One failed, or Ctrl-C
            _cancel(futures)
            raise

    def run_once(
        self, is_training: bool, zero_grad: bool | None, batch: Any, target: Any
    ) -> list[Any]:
        """Runs all rows once; returns the results of the workers that have one.

        Args:
            is_training: Whether to run backwards as well.
            zero_grad: Whether gradients become None first, or zeros; None: they stay.
            batch: The batch.
            target: Its target, for training.
        """
        count = self.table.n_microbatches
        batches = cut_batch(batch, count)
        targets = cut_batch(target, count, "the target") if is_training else []
        self.step += 1
        futures: list[Future[Any]] = []
        failures: list[Exception] = []
        for row, info in enumerate(self.infos):
            own = (self._own_inputs(row, batches), self._own_targets(row, targets))
            args = (self.number, self.step, is_training, zero_grad, *own)
            try:
                futures.append(rpc_async(info, host.start, args=args, timeout=0))
            except Exception as error:
                failures.append(error)
                self._abort()
                break
        return [result for result in self._results(futures, failures) if result is not None]

    def _own_inputs(self, row: int, batches: Sequence[Any]) -> dict[int, dict[int, list[Any]]]:
        """Returns the parts of the batch that a worker's stages take, by stage and micro-batch."""
        return {
            stage: {
                number: picked_for(stage, self.stages.wiring, part)
                for number, part in enumerate(batches)
                if self.table.worker_of(stage, number) == row
            }
            for stage in self._inputs[row]
        }

    def _own_targets(self, row: int, targets: Sequence[Any]) -> dict[int, Any]:
        """Returns the targets of the micro-batches for which a worker runs the last stage."""
        return {
            number: part
            for number, part in enumerate(targets)
            if self.table.worker_of(self._last, number) == row
        }

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
        for info in self.infos:
            try:
                ignore_errors(
                    rpc_async(info, host.abort, args=(self.number, self.step), timeout=_END_S)
                )
            except WorkerLost:
                continue

    def close(self) -> None:
        """Ends the pipeline on all workers, and releases its stages; passes over lost workers."""
        for info in self.infos if self._hosts else ():
            try:
                rpc_sync(info, host.close, args=(self.number,), timeout=_END_S)
            except (WorkerLost, TimeoutError):
                continue
        self._hosts.clear()


def _cancel(futures: Iterable[Future[Any]]) -> None:
    """Gives up calls, so that their later errors are not reported as never looked at."""
    for future in futures:
        future.cancel()
