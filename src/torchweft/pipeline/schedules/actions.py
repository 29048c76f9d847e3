"""The actions of workers, and a run of their rows in virtual time.

Checks, predictions and pictures all follow from such a run. Every worker runs its row in order. An
action starts as soon as the worker is free and the results that the action needs have arrived. A
send never blocks; a result of another worker arrives ``latency_s`` after the action that made it.
Results are written like actions: ``1F3`` is the output of stage 1, ``1I3`` the gradient of its
input, ``1W3`` the gradient of its parameters.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """The kind of an action; the value is its letter in tables and in the CSV form.

    The backward pass of a stage is one action (``BACKWARD``) or two: the gradients of the stage's
    input (``BACKWARD_INPUT``), which the previous stage waits for, and those of its parameters
    (``BACKWARD_WEIGHT``), which no other worker waits for (Qi et al. 2023, zero bubble).
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UPDATE = "U"


KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input part",
    Kind.BACKWARD_WEIGHT: "backward, weight part",
    Kind.UPDATE: "update",
}
"""The kinds in words, for pictures, traces and reports."""


class Weights(enum.Enum):
    """The version of its parameters that a stage uses for a minibatch.

    A stage counts its optimizer steps (``Kind.UPDATE``): version 0 has had none. The backward pass
    of a minibatch uses the version of its forward pass, so a worker keeps several versions.

    Attributes:
        STASHING: The newest version at the time of the forward pass (PipeDream).
        VERTICAL_SYNC: On all stages, the newest version of stage 0 at the time when the minibatch
            entered it (PipeDream).
        DOUBLE_BUFFERED: On all stages version ``max(0, k - 1)``, if the gradients of the minibatch
            go into update ``k``, counted from 0; two versions suffice (PipeDream-2BW).
    """

    STASHING = "stashing"
    VERTICAL_SYNC = "vertical-sync"
    DOUBLE_BUFFERED = "2bw"


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a worker: one kind of work of one stage, for one micro-batch.

    Attributes:
        stage: The stage, counted from 0.
        kind: The kind of work.
        microbatch: The micro-batch (in an asynchronous table, the minibatch), counted from 0. An
            update takes in the gradients of all minibatches up to this one that no earlier update
            of the stage took in; with replicas, those of every replica.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Rows = Sequence[Sequence[Action]]
Edges = Sequence[tuple[int, int]]

_MADE_BY: dict[Kind, tuple[Kind, ...]] = {
    Kind.FORWARD: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Kind.BACKWARD_INPUT: (Kind.BACKWARD_INPUT,),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_WEIGHT,),
    Kind.UPDATE: (),
}


class Span(NamedTuple):
    """An action and its time, in seconds since the start of the table."""

    action: Action
    start_s: float
    end_s: float


class Run(NamedTuple):
    """How far the workers came.

    Attributes:
        spans: The actions that ran, in the order of each worker's row.
        missing: For each worker that could not go on, the result that it waits for.
    """

    spans: tuple[tuple[Span, ...], ...]
    missing: dict[int, Action]


def chain(n_stages: int) -> Edges:
    """Returns the edges of stages that follow each other."""
    return [(stage, stage + 1) for stage in range(n_stages - 1)]


def results_of(action: Action) -> list[Action]:
    """Returns the results that an action makes."""
    return [Action(action.stage, kind, action.microbatch) for kind in _MADE_BY[action.kind]]


class Needs:
    """Knows which results an action needs.

    Args:
        rows: The table's rows; their updates say which gradients each update takes in.
        edges: Pairs of stages; the output of the first is an input of the second.
    """

    def __init__(self, rows: Rows, edges: Edges) -> None:
        self._before: dict[int, list[int]] = defaultdict(list)
        self._after: dict[int, list[int]] = defaultdict(list)
        for source, target in edges:
            self._before[target].append(source)
            self._after[source].append(target)
        self._updates = updates_of(rows)

    def of(self, action: Action) -> Iterator[Action]:
        """Returns the results that ``action`` needs."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is Kind.FORWARD:
            for source in self._before[stage]:
                yield Action(source, Kind.FORWARD, microbatch)
        elif kind is Kind.BACKWARD_WEIGHT:
            yield Action(stage, Kind.BACKWARD_INPUT, microbatch)
        elif kind is Kind.UPDATE:
            updates = self._updates[stage]
            place = bisect_left(updates, microbatch)
            first = updates[place - 1] + 1 if place else 0
            for each in range(first, microbatch + 1):
                yield Action(stage, Kind.BACKWARD_WEIGHT, each)
        else:
            yield Action(stage, Kind.FORWARD, microbatch)
            for target in self._after[stage]:
                yield Action(target, Kind.BACKWARD_INPUT, microbatch)


def updates_of(rows: Rows) -> dict[int, list[int]]:
    """Returns the minibatches after which each stage is updated, in ascending order."""
    found: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        for action in row:
            if action.kind is Kind.UPDATE:
                found[action.stage].add(action.microbatch)
    return defaultdict(list, {stage: sorted(found[stage]) for stage in found})


def run(
    rows: Rows,
    edges: Edges,
    duration_s: Callable[[Action], float],
    latency_s: float = 0.0,
) -> Run:
    """Runs each row in order, until all are done or no worker can go on.

    Args:
        rows: One row of actions for each worker.
        edges: The stage graph, as pairs of stages.
        duration_s: Returns the duration of an action.
        latency_s: The time from the end of an action until another worker has its results.
    """
    return _Execution(rows, edges, duration_s, latency_s).run()


class _Execution:
    """The state of a run: the results there are, and the workers that wait for others."""

    def __init__(
        self, rows: Rows, edges: Edges, duration_s: Callable[[Action], float], latency_s: float
    ) -> None:
        self._rows = rows
        self._needs = Needs(rows, edges)
        self._duration_s = duration_s
        self._latency_s = latency_s
        self._made: dict[Action, tuple[int, float]] = {}  # by result: its maker, and when
        self._spans: list[list[Span]] = [[] for _ in rows]
        self._missing: dict[int, Action] = {}
        self._waiting: dict[Action, list[int]] = defaultdict(list)
        self._runnable = list(range(len(rows)))

    def run(self) -> Run:
        while self._runnable:
            worker = self._runnable.pop()
            self._missing.pop(worker, None)
            n_actions = len(self._rows[worker])
            while len(self._spans[worker]) < n_actions and worker not in self._missing:
                self._step(worker)
        return Run(tuple(map(tuple, self._spans)), self._missing)

    def _step(self, worker: int) -> None:
        """Runs the next action of a worker, or notes the result that it waits for."""
        spans = self._spans[worker]
        action = self._rows[worker][len(spans)]
        start_s = spans[-1].end_s if spans else 0.0
        for need in self._needs.of(action):
            if need not in self._made:
                self._missing[worker] = need
                self._waiting[need].append(worker)
                return
            maker, made_s = self._made[need]
            start_s = max(start_s, made_s + (self._latency_s if maker != worker else 0.0))
        end_s = start_s + self._duration_s(action)
        spans.append(Span(action, start_s, end_s))
        for result in results_of(action):
            self._made[result] = worker, end_s
            self._runnable += self._waiting.pop(result, ())
