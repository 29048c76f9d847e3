"""The table of a schedule: which worker runs which actions, in which order.

Its CSV form is that which torch.distributed.pipelining documents: one row for each worker; each
cell is empty or an action, as ``2F5``. Weft adds ``U`` for updates. Two further forms of cells of
torch are read. A pair, ``(0F7;7B3)OVERLAP_F_B``, becomes its two actions, one after the other.
Communication (``1SEND_F0``, ``2UNSHARD``) is passed over: Weft's workers find out for themselves
which messages the actions need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchweft.columns import aligned
from torchweft.errors import ConfigurationError
from torchweft.pipeline.errors import CellError
from torchweft.pipeline.schedules.actions import Action, Edges, Kind, Span, Weights, chain, run

_ACTION = re.compile(r"([0-9]{1,6})([FBIWU])([0-9]{1,6})")
_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(
    r"[0-9]+(?:(?:SEND|RECV)_[FB][0-9]+|(?:UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*)"
)


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
