"""Measures when each action of a pipeline runs: notes on the workers, timelines on the driver.

Workers of one host read one monotonic clock. For a worker with another clock, the driver takes the
difference from the shortest of a few calls; see ``torchweft.reports.lead_of``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple

from torchweft.errors import ConfigurationError, WeftError
from torchweft.ids import WorkerInfo
from torchweft.pipeline.schedules import Costs, Span, Table, Timeline, predict
from torchweft.pipeline.schedules.timeline import measured_costs, report
from torchweft.probe import clock_id
from torchweft.reports import Lead, lead_of
from torchweft.rpc import rpc_sync

_PINGS = 5


class StepNotes(NamedTuple):
    """A step of one worker, or a run of an asynchronous schedule, in seconds on its clock.

    Attributes:
        step: Number of the step or run.
        times_s: Begin and end of each action of its row, in order.
        peak_held: The most micro-batches whose activations it held.
        n_minibatches: The minibatches of a run, on which the row depends.
    """

    step: int
    times_s: list[tuple[float, float]]
    peak_held: int
    n_minibatches: int = 0


class WorkerNotes(NamedTuple):
    """The notes of one worker.

    Attributes:
        clock: Id of its clock; empty if unknown.
        steps: Its completed steps.
    """

    clock: str
    steps: list[StepNotes]


class Notes:
    """When the actions of one worker begin and end; used by the thread that runs them.

    An action begins when the one before it has ended, or when the last wait before it is over.
    """

    def __init__(self) -> None:
        self.steps: list[StepNotes] = []
        self._times_s: list[tuple[float, float]] = []
        self._busy_since_s = 0.0

    def begin_step(self) -> None:
        """Notes that the worker begins its row."""
        self._times_s = []
        self._busy_since_s = time.monotonic()

    def end_wait(self) -> None:
        """Notes that values have come which the worker waited for."""
        self._busy_since_s = time.monotonic()

    def end_action(self) -> None:
        """Notes that an action is done, and its results are sent."""
        now_s = time.monotonic()
        self._times_s.append((self._busy_since_s, now_s))
        self._busy_since_s = now_s

    def end_step(self, step: int, peak_held: int, n_minibatches: int = 0) -> None:
        """Notes that the row is done."""
        self.steps.append(StepNotes(step, self._times_s, peak_held, n_minibatches))


class Recording:
    """The measured steps of a pipeline; made by ``Pipe.recording``, filled when its block ends.

    With an asynchronous schedule, each run is measured as one step, with its updates.

    Attributes:
        steps: The timeline of each training step in the block, in order. Time 0 is the begin of its
            first action.
        peak_held: For each worker, the most micro-batches whose activations it held.
        clock_error_s: Bound of the error between the clocks of two workers, in seconds; 0 if all
            are on the driver's host.

    Args:
        table_of: Returns the pipeline's table, for the number of minibatches of a run.
        edges: The pairs of stages between which values go.
        workers: The workers, by row.
        start: Starts the notes on all workers.
        stop: Stops them; returns them by row.
    """

    def __init__(
        self,
        table_of: Callable[[int], Table],
        edges: Sequence[tuple[int, int]],
        workers: Sequence[WorkerInfo],
        start: Callable[[], object],
        stop: Callable[[], list[WorkerNotes]],
    ) -> None:
        self.steps: tuple[Timeline, ...] = ()
        self.peak_held: tuple[int, ...] = ()
        self.clock_error_s = 0.0
        self._table_of = table_of
        self._edges = edges
        self._workers = workers
        self._start = start
        self._stop = stop

    def __enter__(self) -> Recording:
        self._start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            notes = self._stop()
            ahead_s = self._clocks([each.clock for each in notes])
        except (WeftError, TimeoutError):
            if error is None:
                raise
            return  # The block's own error says more.
        self.peak_held = tuple(
            max((step.peak_held for step in each.steps), default=0) for each in notes
        )
        self.steps = timelines_of(self._table_of, self._edges, notes, ahead_s)

    def _clocks(self, clocks: Sequence[str]) -> list[float]:
        """Returns, for each worker, how far its clock is ahead of the driver's, in seconds."""
        own = clock_id()
        best: dict[str, Lead] = {own: Lead(0.0, 0.0, 0.0)} if own else {}
        names = [clock or worker.name for clock, worker in zip(clocks, self._workers, strict=True)]
        for name, worker in zip(names, self._workers, strict=True):
            if name != own:
                found = [best[name]] if name in best else []
                found.append(lead_of(_readings(worker)))
                best[name] = min(found, key=lambda lead: lead.error_s)
        errors = sorted(best[name].error_s for name in set(names))
        self.clock_error_s = sum(errors[-2:])  # the two worst clocks, compared with each other
        return [best[name].ahead_s for name in names]

    @property
    def timeline(self) -> Timeline:
        """The step of median duration; of two, the shorter.

        Raises:
            ConfigurationError: No step was recorded.
        """
        wanted_s = median_low([each.makespan_s for each in self._checked()])
        return next(each for each in self.steps if each.makespan_s == wanted_s)

    @property
    def costs(self) -> Costs:
        """The median duration of each stage's actions, and of a message, over all steps."""
        return measured_costs(self._checked())

    @property
    def predicted(self) -> Timeline:
        """The timeline that the measured costs predict, if no action takes longer than usual."""
        return predict(self.timeline.table, self.costs, self._edges)

    def report(self) -> str:
        """Returns a table: idle share and peak activations of each worker, measured and predicted.

        The measured idle share is the mean over all steps.
        """
        names = [worker.name for worker in self._workers]
        return report(self._checked(), self.predicted, names, self.peak_held)

    def _checked(self) -> tuple[Timeline, ...]:
        if not self.steps:
            raise ConfigurationError(
                "no training step was recorded; call step() in the block, or take all losses of "
                "run(), and read it afterwards"
            )
        return self.steps


def timelines_of(
    table_of: Callable[[int], Table],
    edges: Sequence[tuple[int, int]],
    notes: Sequence[WorkerNotes],
    ahead_s: Sequence[float],
) -> tuple[Timeline, ...]:
    """Returns the timelines of the steps that all workers completed.

    Args:
        table_of: Returns the table, for the number of minibatches of a run.
        edges: The pairs of stages between which values go.
        notes: The notes of each worker.
        ahead_s: How far each worker's clock is ahead.
    """
    by_worker = [{step.step: step for step in each.steps} for each in notes]
    found = []
    for step in sorted(set(by_worker[0]).intersection(*by_worker[1:])):
        table = table_of(by_worker[0][step].n_minibatches)
        times_s = [each[step].times_s for each in by_worker]
        begin_s = min(row[0][0] - ahead for row, ahead in zip(times_s, ahead_s, strict=True) if row)
        spans = tuple(
            tuple(
                Span(action, start_s - ahead - begin_s, end_s - ahead - begin_s)
                for action, (start_s, end_s) in zip(actions, row, strict=True)
            )
            for actions, row, ahead in zip(table.rows, times_s, ahead_s, strict=True)
        )
        found.append(Timeline(table, spans, edges, is_measured=True))
    return tuple(found)


def read_clock() -> float:
    """Returns the time of this process's monotonic clock, in seconds."""
    return time.monotonic()


def _readings(worker: WorkerInfo) -> list[tuple[float, float, float]]:
    """Reads a worker's clock by a few calls; see ``lead_of``."""
    found = []
    for _ in range(_PINGS):
        sent_s = time.monotonic()
        there_s = rpc_sync(worker, read_clock)
        found.append((sent_s, there_s, time.monotonic()))
    return found
