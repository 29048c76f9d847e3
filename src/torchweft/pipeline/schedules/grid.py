"""Draws rows as a grid of text, in which every action takes one time step."""

from __future__ import annotations

from collections.abc import Sequence

from torchweft.columns import aligned
from torchweft.pipeline.schedules.actions import Action, Kind
from torchweft.pipeline.schedules.execution import Edges, Rows, Span, run


def draw(rows: Rows, edges: Edges) -> str:
    """Returns the grid: a line for each worker, a column for each time step."""
    ran = run(rows, edges, _steps)
    grid = [_cells(spans) for spans in ran.spans]
    n_steps = max((step for cells in grid for step in cells), default=-1) + 1
    head = ["step", *map(str, range(n_steps))]
    body = [
        [f"worker {worker}", *(cells.get(step, "") for step in range(n_steps))]
        for worker, cells in enumerate(grid)
    ]
    lines = aligned([head, *body], [True] * len(head), gap=" ")
    return "".join(f"{line}\n" for line in lines)


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
