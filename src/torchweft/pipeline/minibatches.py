"""The driver's side of an asynchronous pipeline: one run, from the first minibatch to the last."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.arguments import kind_of
from torchweft.errors import (
    ArgumentTypeError,
    ConfigurationError,
    PipelineError,
    WorkerLost,
)
from torchweft.pipeline.cutting import Stages
from torchweft.pipeline.host import Host
from torchweft.pipeline.runner import OptimizerMaker
from torchweft.pipeline.schedules import SchedulePipeDream, Table, check
from torchweft.pipeline.step import END_S, blame, check_untrained, uncut
from torchweft.pipeline.streaming import LossQueue, LossReport
from torchweft.pipeline.wiring import BATCH, Wiring, pick
from torchweft.rpc import RRef, on


def short_table(schedule: SchedulePipeDream, n_workers: int) -> Table:
    """Returns the table of an asynchronous schedule for one minibatch on each replica."""
    held = Counter(stage for stages in schedule.placement(n_workers) for stage in stages)
    return schedule.table(n_workers, max(held.values()))


def check_updates(table: Table, is_endless: bool, optimizer: OptimizerMaker | None) -> None:
    """Checks that there is an optimizer where the table steps it, and only there.

    Raises:
        ConfigurationError: There is none, or one too many; or another schedule has updates.
    """
    if is_endless and optimizer is None:
        raise ConfigurationError(
            f"{table.name} steps an optimizer on each worker; pass a function that makes it: "
            "optimizer=functools.partial(torch.optim.SGD, lr=...)"
        )
    if not is_endless and table.is_asynchronous:
        raise ConfigurationError(
            f"the table {table.name!r} has updates; only SchedulePipeDream can run them"
        )
    if not is_endless and optimizer is not None:
        raise ConfigurationError(
            f"optimizer is for asynchronous schedules, and {table.name} is synchronous; call "
            "step() of pipe.optimizer(...) after each pipe.step(...)"
        )


def check_endless(
    schedule: SchedulePipeDream, n_workers: int, stages: Stages, checkpoint: str
) -> None:
    """Checks that an asynchronous schedule can run these stages.

    Raises:
        ConfigurationError: Stages share a weight, or the rule of checkpoints has no meaning.
        TableError: Some action would wait for ever.
    """
    check(schedule.table(n_workers, 4 * n_workers), stages.wiring.edges)
    if stages.ties:
        first, *others = stages.ties[0]
        listed = ", ".join(f"{name!r} of stage {stage}" for stage, name in others)
        raise ConfigurationError(
            f"the weight {first[1]!r} of stage {first[0]} is also {listed}; with an asynchronous "
            "schedule these stages are at different versions of it, so it cannot stay one weight: "
            "use a synchronous schedule, such as Schedule1F1B, or a weight for each stage"
        )
    if checkpoint == "except_last":
        raise ConfigurationError(
            "checkpoint is 'except_last', and an asynchronous schedule has no last micro-batch; "
            "pass 'never' or 'always'"
        )


class _Ended(NamedTuple):
    """A worker has answered a call."""

    row: int
    is_run: bool
    error: Exception | None


class AsynchronousRun:
    """The calls of one run, and its events. Not thread-safe.

    Args:
        number: Number of the run.
        hosts: The hosts of the workers, by row.
        table: Which worker has which stages.
        wiring: The values between the stages.
        limit_s: How long to wait for workers that are to end.
    """

    def __init__(
        self,
        number: int,
        hosts: Sequence[RRef[Host]],
        table: Table,
        wiring: Wiring,
        limit_s: float,
    ) -> None:
        self._number = number
        self._hosts = hosts
        self._wiring = wiring
        self._limit_s = limit_s
        self._seats = [table.replicas(stage) for stage in range(table.n_stages)]
        self._inputs = [stage for stage in range(table.n_stages) if wiring.taken(stage, BATCH)]
        reports = LossQueue()
        self._events = reports.events
        self._reports = RRef(reports)
        self._running: set[int] = set()
        self._bound = 2 * len(hosts) + max(map(len, self._seats))  # of those under way
        self._n_entered = self._n_taken = 0
        self._losses: dict[int, Tensor] = {}  # those that are there, and were not taken

    def losses(self, source: Iterator[Any]) -> Generator[Tensor, None, None]:
        """Yields the losses of all minibatches; ends the run on the workers in any case."""
        try:
            self._call_all(Host.start, True, True, {}, {}, self._reports, is_run=True)
            is_open = True
            while True:
                while is_open and self._n_entered - self._n_taken < self._bound:
                    is_open = self._enter_next(source)
                if self._n_taken == self._n_entered:
                    break
                while self._n_taken not in self._losses:
                    self._handle_event()
                self._n_taken += 1
                yield self._losses.pop(self._n_taken - 1)
            while self._running:
                self._handle_event()
        finally:
            self._stop()

    # The minibatches

    def _enter_next(self, source: Iterator[Any]) -> bool:
        """Takes a minibatch from the program and lets it enter; returns whether there was one."""
        number = self._n_entered
        try:
            found = next(source)
        except StopIteration:
            self._call_all(Host.finish, number)
            return False
        batch, target = _pair(found, number)
        inputs: list[dict[int, Any]] = [{} for _ in self._hosts]
        for stage in self._inputs:
            values = [pick(batch, take, stage) for take in self._wiring.taken(stage, BATCH)]
            inputs[self._row_of(stage, number)][stage] = {number: values}
        last = self._row_of(len(self._seats) - 1, number)
        for row, given in enumerate(inputs):
            targets = {number: target} if row == last else {}
            self._call(row, Host.enter, number, given, targets)
        self._n_entered += 1
        return True

    def _row_of(self, stage: int, minibatch: int) -> int:
        seats = self._seats[stage]
        return seats[minibatch % len(seats)]

    # Calls and events

    def _call_all(self, method: Callable[..., Any], *args: Any, is_run: bool = False) -> None:
        for row in range(len(self._hosts)):
            self._call(row, method, *args, is_run=is_run)

    def _call(self, row: int, method: Callable[..., Any], *args: Any, is_run: bool = False) -> None:
        """Calls a worker; its answer becomes an event."""
        limit_s = 0 if is_run else self._limit_s
        future = on(self._hosts[row], limit_s).rpc_async(method, self._number, *args)
        if is_run:
            self._running.add(row)
        future.add_done_callback(functools.partial(_note, self._events, row, is_run))

    def _handle_event(self) -> None:
        """Waits for the next event.

        Raises:
            PipelineError: A stage failed.
            WorkerLost: A worker was lost.
        """
        event = self._next_event()
        if isinstance(event, LossReport):
            event.mark(event.loss)
            self._losses[event.minibatch] = event.loss
            return
        if event.is_run:
            self._running.discard(event.row)
        if event.error is not None:
            raise self._explain(event.error)

    def _next_event(self) -> Any:
        # As long as workers run, they bound all waits themselves.
        try:
            return self._events.get(timeout=None if self._running else self._limit_s)
        except queue.Empty:
            raise PipelineError(
                f"the loss of minibatch {self._n_taken} did not come within "
                f"{self._limit_s:g} s after the workers had ended the run",
                microbatch=self._n_taken,
            ) from None

    # The end

    def _explain(self, error: Exception) -> Exception:
        """Ends the run on all workers; returns the error that explains the others."""
        return min([error, *self._stop()], key=blame)

    def _stop(self) -> list[Exception]:
        """Ends the run on the workers that still run it, and waits until they have ended it.

        Returns:
            The errors that they answer.
        """
        for host in self._hosts if self._running else ():
            with contextlib.suppress(WorkerLost):
                on(host, END_S).rpc_async(Host.abort, self._number)
        errors = []
        deadline_s = time.monotonic() + min(self._limit_s, threading.TIMEOUT_MAX)
        while self._running:
            try:
                event = self._events.get(timeout=max(deadline_s - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if isinstance(event, _Ended):
                self._running -= {event.row} if event.is_run else set()
                errors += [event.error] if event.error is not None else []
        return errors


def _note(
    events: queue.SimpleQueue[Any], row: int, is_run: bool, future: torch.futures.Future[Any]
) -> None:
    """Puts the end of a call among the events of a run, unless it says nothing."""
    error = None
    try:
        future.value()
    except Exception as raised:
        error = raised
    if is_run or error is not None:
        events.put(_Ended(row, is_run, error))


def _pair(found: Any, number: int) -> tuple[Any, Any]:
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        size = f" of {len(found)}" if isinstance(found, (tuple, list)) else ""
        raise ArgumentTypeError(
            f"minibatch {number} is {kind_of(found)}{size}; run takes pairs of a batch and a target"
        )
    for value, name in zip(found, ("the batch", "the target"), strict=True):
        check_untrained(value, name)
    return uncut(found[0]), uncut(found[1])
