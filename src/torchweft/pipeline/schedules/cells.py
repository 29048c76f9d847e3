"""Reads and writes the CSV form of tables, which torch.distributed.pipelining documents.

One row for each worker; each cell is empty or an action, as ``2F5``. Weft adds ``U`` for updates.
Two further forms of cells of torch are read. A pair, ``(0F7;7B3)OVERLAP_F_B``, becomes its two
actions, one after the other. Communication (``1SEND_F0``, ``2UNSHARD``) is passed over: Weft's
workers find out for themselves which messages the actions need.
"""

from __future__ import annotations

import re

from torchweft.pipeline.schedules.actions import Action, Kind
from torchweft.pipeline.schedules.errors import CellError

_ACTION = re.compile(r"([0-9]{1,6})([FBIWU])([0-9]{1,6})")
_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(
    r"[0-9]+(?:(?:SEND|RECV)_[FB][0-9]+|(?:UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*)"
)


def read_rows(text: str) -> tuple[tuple[Action, ...], ...]:
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


def write_rows(rows: tuple[tuple[Action, ...], ...]) -> str:
    """Returns the CSV form of rows. A row without actions is one comma, as no blank line counts."""
    return "".join((",".join(map(str, row)) or ",") + "\n" for row in rows)


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
