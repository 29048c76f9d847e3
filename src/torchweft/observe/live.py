"""Shows a group on a terminal until Ctrl-C, with rich; only ``torchweft top`` imports this."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from torchweft.observe.text import Table

_FLEXIBLE = frozenset(
    ("function", "blocked-by", "channels", "made", "what", "in-call", "staleness", "drawn")
)
"""Columns that are cut off first where the terminal is narrow."""
_RARE = ("serving", "ctx", "passes", "held", "owned", "host", "sent/s", "recv/s", "memory")
"""Columns of the overview that a narrow terminal leaves out, first ones first."""
_GAP = 2


class Seen(Protocol):
    """What was seen of a group; see ``torchweft.cli.top.Look``."""

    title: str

    def tables(self) -> list[Table]:
        """Returns the tables to show."""

    def notes(self) -> list[str]:
        """Returns what is wrong."""

    def stacks(self) -> str:
        """Returns stacks of threads."""


def show(look: Callable[[], Seen], interval_s: float, console: Console | None = None) -> None:
    """Looks and shows what is seen until Ctrl-C."""
    console = console or Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            live.update(picture(look(), console.width), refresh=True)
            time.sleep(max(interval_s - (time.monotonic() - began_s), 0.0))


def picture(seen: Seen, width: int) -> RenderableType:
    """Returns everything that was seen, for a terminal of ``width`` columns."""
    clock = time.strftime("%H:%M:%S")
    parts: list[RenderableType] = [Text(f"torchweft top: {seen.title}, {clock}", style="bold")]
    parts += [Text(note, style="bold red") for note in seen.notes()]
    for table in seen.tables():
        parts += [Text(""), _table(fitting(table, width))]
    stacks = seen.stacks()
    if stacks:
        parts += [Text(""), Text(stacks)]
    parts.append(Text("Ctrl-C ends", style="dim"))
    return Group(*parts)


def fitting(table: Table, width: int) -> Table:
    """Returns a table without the columns for which a terminal has no room."""
    for name in _RARE:
        if _width_of(table) <= width:
            break
        if name in table.heads:
            at = list(table.heads).index(name)
            rows = [[*row[:at], *row[at + 1 :]] for row in table.rows]
            heads = [*table.heads[:at], *table.heads[at + 1 :]]
            table = Table(table.title, heads, rows, table.left - (at < table.left))
    return table


def _width_of(table: Table) -> int:
    columns = zip(table.heads, *table.rows, strict=True)
    return sum(max(map(len, column)) + _GAP for column in columns)


def _table(table: Table) -> RichTable:
    drawn = RichTable(
        title=Text(table.title) if table.title else None,
        title_justify="left",
        box=None,
        padding=(0, _GAP, 0, 0),
        header_style="bold cyan",
    )
    for at, head in enumerate(table.heads):
        is_text = at < table.left or head in _FLEXIBLE
        is_fixed = head not in _FLEXIBLE
        drawn.add_column(
            head,
            justify="left" if is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=max([len(head), *(len(row[at]) for row in table.rows)]) if is_fixed else None,
        )
    for row in table.rows:
        style = "red" if "silent" in row or "lost" in row else ""
        drawn.add_row(*(Text(cell) for cell in row), style=style)
    return drawn
