"""Tables, which say which worker runs which actions in which order; and runs in virtual time.

Checks, predictions and pictures all follow from such a run. Every worker runs its row in order. An
action starts as soon as the worker is free and the results that the action needs have arrived. A
send never blocks; a result of another worker arrives ``latency_s`` after the action that made it.
Results are written like actions: ``1F3`` is the output of stage 1, ``1I3`` the gradient of its
input, ``1W3`` the gradient of its parameters.

The CSV form of a table is that which torch.distributed.pipelining documents: one row for each
worker; each cell is empty or an action, as ``2F5``. Weft adds ``U`` for updates. Two further forms
of cells of torch are read. A pair, ``(0F7;7B3)OVERLAP_F_B``, becomes its two actions, one after the
other. Communication (``1SEND_F0``, ``2UNSHARD``) is passed over: Weft's workers find out for
themselves which messages the actions need.
"""

from __future__ import annotations

import enum
import itertools
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torchweft.columns import aligned
from torchweft.errors import ConfigurationError
from torchweft.pipeline.errors import CellError, TableError

_ACTION = re.compile(r"([0-9]{1,6})([FBIWU])([0-9]{1,6})")
_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(
    r"[0-9]+(?:(?:SEND|RECV)_[FB][0-9]+|(?:UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*)"
)


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


class RunResult(NamedTuple):
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


class Dependencies:
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
) -> RunResult:
    """Runs each row in order, until all are done or no worker can go on.

    Args:
        rows: One row of actions for each worker.
        edges: The stage graph, as pairs of stages.
        duration_s: Returns the duration of an action.
        latency_s: The time from the end of an action until another worker has its results.
    """
    return _VirtualRun(rows, edges, duration_s, latency_s).run()


class _VirtualRun:
    """The state of a run: the results there are, and the workers that wait for others."""

    def __init__(
        self, rows: Rows, edges: Edges, duration_s: Callable[[Action], float], latency_s: float
    ) -> None:
        self._rows = rows
        self._needs = Dependencies(rows, edges)
        self._duration_s = duration_s
        self._latency_s = latency_s
        self._made: dict[Action, tuple[int, float]] = {}  # by result: its maker, and when
        self._spans: list[list[Span]] = [[] for _ in rows]
        self._missing: dict[int, Action] = {}
        self._waiting: dict[Action, list[int]] = defaultdict(list)
        self._runnable = list(range(len(rows)))

    def run(self) -> RunResult:
        while self._runnable:
            worker = self._runnable.pop()
            self._missing.pop(worker, None)
            n_actions = len(self._rows[worker])
            while len(self._spans[worker]) < n_actions and worker not in self._missing:
                self._step(worker)
        return RunResult(tuple(map(tuple, self._spans)), self._missing)

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


@dataclass(frozen=True, slots=True)
class Table:
    """The actions of every worker, in the order in which the worker runs them.

    A table is plain data: nothing about it is checked before ``check``.

    Attributes:
        name: The schedule's name, for messages and titles.
        n_stages: The number of stages.
        n_microbatches: The number of micro-batches; in an asynchronous table, of minibatches.
        rows: The actions, one row for each worker.
        weights: Which version of the parameters a minibatch uses. A table without updates has only
            one version.
    """

    name: str
    n_stages: int
    n_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    weights: Weights = Weights.STASHING
    _workers: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    _stages: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        workers = {
            (action.stage, action.microbatch): worker
            for worker, row in enumerate(self.rows)
            for action in row
            if action.kind is Kind.FORWARD
        }
        stages = tuple(tuple(sorted({action.stage for action in row})) for row in self.rows)
        object.__setattr__(self, "_workers", workers)
        object.__setattr__(self, "_stages", stages)

    @classmethod
    def from_csv(
        cls, text: str, *, name: str = "CSV", weights: Weights = Weights.STASHING
    ) -> Table:
        """Reads a table from the CSV form of torch.distributed.pipelining.

        One line for each worker; each cell is empty, or an action like ``2F5``. A pair of torch,
        ``(0F7;7B3)OVERLAP_F_B``, becomes two actions; torch's cells for communication, such as
        ``1SEND_F0``, are passed over. The stages and micro-batches are counted by the highest
        number of each.

        Args:
            text: The CSV text.
            name: The table's name.
            weights: The table's rule for versions of the parameters.

        Raises:
            CellError: A cell cannot be read; the error has its row and column.
            ConfigurationError: The text has no action.
        """
        rows = _read_rows(text)
        actions = [action for row in rows for action in row]
        if not actions:
            raise ConfigurationError("the CSV text has no action; pass one line for each worker")
        n_stages = max(action.stage for action in actions) + 1
        n_microbatches = max(action.microbatch for action in actions) + 1
        return cls(name, n_stages, n_microbatches, rows, weights)

    def to_csv(self) -> str:
        """Returns the rows in CSV form, one line for each worker, without empty cells."""
        # A row without actions is one comma, as blank lines at the end do not count.
        return "".join((",".join(map(str, row)) or ",") + "\n" for row in self.rows)

    @property
    def n_workers(self) -> int:
        """The number of workers."""
        return len(self.rows)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the optimizer steps are part of the table."""
        return any(action.kind is Kind.UPDATE for row in self.rows for action in row)

    @property
    def seats(self) -> Mapping[tuple[int, int], int]:
        """The worker that runs each stage for each micro-batch."""
        return self._workers

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Returns the worker that runs a stage for a micro-batch.

        Raises:
            KeyError: No worker runs the forward pass of that stage for that micro-batch.
        """
        return self._workers[stage, microbatch]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Returns the stages that a worker holds, in ascending order."""
        return self._stages[worker]

    def replicas(self, stage: int) -> tuple[int, ...]:
        """Returns the workers that hold a stage, in ascending order."""
        return tuple(worker for worker, held in enumerate(self._stages) if stage in held)

    def text(self, edges: Edges | None = None) -> str:
        """Returns the table as a grid, in which every action takes one time step.

        A row of the grid is a worker, a column a time step; idle cells are blank. An update takes
        no time: it is the letter ``U`` after the action before it. Actions that wait for ever are
        left out, so the grid also shows where a wrong table stops.

        Args:
            edges: The stage graph, as pairs of stages; a chain if it is not given.
        """
        ran = run(self.rows, chain(self.n_stages) if edges is None else edges, _steps)
        grid = [_cells(spans) for spans in ran.spans]
        n_steps = max((step for cells in grid for step in cells), default=-1) + 1
        head = ["step", *map(str, range(n_steps))]
        body = [
            [f"worker {worker}", *(cells.get(step, "") for step in range(n_steps))]
            for worker, cells in enumerate(grid)
        ]
        lines = aligned([head, *body], [True] * len(head), gap=" ")
        return "".join(f"{line}\n" for line in lines)


# CSV


def _read_rows(text: str) -> tuple[tuple[Action, ...], ...]:
    """Returns the rows of a table in CSV form; blank lines at the end do not count.

    Raises:
        CellError: A cell is none of the known forms.
    """
    lines = text.rstrip("\r\n").splitlines()
    return tuple(
        tuple(
            action
            for column, cell in enumerate(line.split(","))
            for action in _read_cell(cell.strip(), row, column)
        )
        for row, line in enumerate(lines)
    )


def _read_cell(cell: str, row: int, column: int) -> list[Action]:
    if not cell or _COMMUNICATION.fullmatch(cell):
        return []
    pair = _PAIR.fullmatch(cell)
    parts = [part.strip() for part in pair.groups()] if pair else [cell]
    matches = [_ACTION.fullmatch(part) for part in parts]
    actions = [Action(int(match[1]), Kind(match[2]), int(match[3])) for match in matches if match]
    if len(actions) < len(parts):
        raise CellError(
            f"row {row}, column {column}: {cell[:60]!r} is no action; a cell is empty, or is "
            "<stage><kind><micro-batch> with the kind F, B, I, W or U, as 2F5, or is a pair of "
            "these, as (0F7;7B3)OVERLAP_F_B",
            row=row,
            column=column,
            cell=cell,
        )
    return actions


# The grid


def _steps(action: Action) -> float:
    return 0.0 if action.kind is Kind.UPDATE else 1.0


def _cells(spans: Sequence[Span]) -> dict[int, str]:
    cells: dict[int, str] = {}
    step = 0
    for action, start_s, _ in spans:
        if action.kind is Kind.UPDATE:
            cells[step] = cells.get(step, "") + "U"
        else:
            step = int(start_s)
            cells[step] = str(action)
    return cells


# Checks. Every stage has one forward and one backward pass of every micro-batch, all on one worker;
# the backward pass is whole, or an input part and a weight part. Every worker can run its row in
# order, with receives that block and sends that do not, without waiting for ever. An update waits
# for the backward passes of all minibatches since the one before it, on every replica.

Place = tuple[int, int]
"""A worker and a position in its row."""

_WHOLE = [Kind.FORWARD, Kind.BACKWARD]
_PARTS = [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]


def check(table: Table, edges: Edges | None = None) -> None:
    """Checks that a table is complete and can be run to its end.

    Args:
        table: The table.
        edges: The stage graph: pairs of stages, where the output of the first is an input of the
            second. A chain of all stages if it is not given.

    Raises:
        TableError: An action is missing, is there twice, is on the wrong worker, or waits for ever.
        ConfigurationError: An edge names a stage that the table does not have.
    """
    edges = checked_edges(table, edges)
    _check_passes(table)
    ran = run(table.rows, edges, lambda action: 0.0)
    if ran.missing:
        raise _stuck(table, ran)


def checked_edges(table: Table, edges: Edges | None) -> Edges:
    """Returns the edges of a stage graph, by default of a chain.

    Raises:
        ConfigurationError: An edge names a stage that the table does not have.
    """
    for edge in edges or ():
        if not all(0 <= stage < table.n_stages for stage in edge):
            raise ConfigurationError(
                f"edge {edge!r} names a stage that {table.name} does not have; its stages are "
                f"0 to {table.n_stages - 1}"
            )
    return chain(table.n_stages) if edges is None else edges


def _check_passes(table: Table) -> None:
    """Checks that each stage has both passes of each micro-batch, each once, on one worker."""
    found: dict[tuple[int, int], dict[Kind, Place]] = defaultdict(dict)
    work = set(itertools.product(range(table.n_stages), range(table.n_microbatches)))
    for worker, row in enumerate(table.rows):
        for position, action in enumerate(row):
            if (action.stage, action.microbatch) not in work:
                raise _error(
                    f"{action} is out of range; {table.name} has the stages 0 to "
                    f"{table.n_stages - 1} and the micro-batches 0 to {table.n_microbatches - 1}",
                    action,
                    (worker, position),
                )
            places = found[action.stage, action.microbatch]
            if action.kind is Kind.UPDATE:
                continue
            if action.kind in places:
                raise _error(f"{action} is there twice", action, (worker, position))
            if places and worker not in {home for home, _ in places.values()}:
                raise _error(
                    f"{action} is on another worker than the other actions of its stage and "
                    "micro-batch",
                    action,
                    (worker, position),
                )
            places[action.kind] = worker, position
    for stage, microbatch in sorted(work):
        places = found[stage, microbatch]
        kinds = {*places}
        wanted = _PARTS if kinds & {*_PARTS[1:]} else _WHOLE
        for kind in sorted(kinds ^ {*wanted}, key=list(Kind).index):
            action = Action(stage, kind, microbatch)
            what = "is one too many" if kind in kinds else "is missing"
            raise _error(
                f"{action} {what}: stage {stage} needs F and B of micro-batch {microbatch}, or F, "
                "I and W",
                action,
                places.get(kind) or next(iter(places.values()), (None, None))[0],
            )


def _stuck(table: Table, ran: RunResult) -> TableError:
    """Returns the error for a run that stopped: it says what each worker waits for."""
    waits = [
        (worker, len(ran.spans[worker]), result) for worker, result in sorted(ran.missing.items())
    ]
    texts = [
        f"worker {worker}, position {position}: {table.rows[worker][position]} waits for {result}"
        for worker, position, result in waits
    ]
    worker, position, result = waits[0]
    return TableError(
        f"{table.name} stops before its end, as actions wait for ever: {'; '.join(texts)}",
        worker=worker,
        position=position,
        action=str(table.rows[worker][position]),
        waits_for=str(result),
    )


def _error(text: str, action: Action, where: Place | int | None = None) -> TableError:
    """Returns an error about an action at a place, or that a worker (None: any) lacks."""
    if isinstance(where, tuple):
        worker, position = where
        return TableError(
            f"worker {worker}, position {position}: {text}",
            worker=worker,
            position=position,
            action=str(action),
        )
    prefix = "" if where is None else f"worker {where}: "
    return TableError(prefix + text, worker=where, action=str(action))
