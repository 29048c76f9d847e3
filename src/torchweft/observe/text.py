"""Tables of workers, functions, calls and threads, and how they are printed.

On a terminal rich draws them, if it is there, and folds what does not fit. Elsewhere they are plain
lines, however wide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchweft.columns import aligned
from torchweft.observe.rates import FunctionRate, PeerRate, WorkerRate
from torchweft.reports import NumberRow, Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

_MOST_FUNCTIONS = 15
_MOST_CALLS = 30
_UNITS = ("B", "kB", "MB", "GB", "TB")
_NAMED = 2
_MOST_VALUES = 4
_MOST_BARS = 20
_BAR_WIDTH = 40
_WIDEST = 1000

LOST, SILENT = "lost", "silent"
"""States of workers that do not answer."""
ERROR = "error"
"""The level of a finding that makes a diagnosis fail."""


class Table(NamedTuple):
    """A table.

    Attributes:
        title: Its title; may be empty.
        heads: The heads of its columns; empty for none.
        rows: Its rows.
        left: How many columns at the left are text; the others are numbers.
        has_text_last: Whether the last column is text as well.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    has_text_last: bool = False

    def at_left(self) -> list[bool]:
        """Returns for each column whether it is text."""
        last = max(map(len, (self.heads, *self.rows))) - 1
        return [at < self.left or (at == last and self.has_text_last) for at in range(last + 1)]


def workers_table(rates: Iterable[WorkerRate], silent: dict[str, str], lost: set[str]) -> Table:
    """Returns a row for each worker, by rank."""
    heads = [column.head for column in WORKER_COLUMNS]
    rows = [
        [column.text(each) for column in WORKER_COLUMNS]
        for each in sorted(rates, key=lambda each: each.report.identity.rank)
    ]
    for name in silent:
        state = LOST if name in lost else SILENT
        rows.append([name, "", state, *[""] * (len(heads) - 3)])
    return Table("", heads, rows, 3, has_text_last=True)


class WorkerColumn(NamedTuple):
    """A column of the table of workers.

    Attributes:
        head: Its head.
        text: Returns the cell of a worker.
        value: Returns the number or text by which workers are sorted.
    """

    head: str
    text: Callable[[WorkerRate], str]
    value: Callable[[WorkerRate], Any]


def _numbers(head: str, name: str, text: Callable[[Any], str] = str) -> WorkerColumn:
    value = attrgetter(name)
    return WorkerColumn(head, lambda each: text(value(each)), value)


def _blocked_text(each: WorkerRate) -> str:
    waits = [f"{one.by} {seconds(one.seconds)}" for one in each.blocked[:_NAMED]]
    more = len(each.blocked) - _NAMED
    return ", ".join(waits) + (f" and {more} more" if more > 0 else "")


def _blocked_s(each: WorkerRate) -> float:
    return max([one.seconds for one in each.blocked], default=0.0)


def functions_table(rates: Sequence[FunctionRate]) -> Table:
    """Returns a row for each of the most frequent functions."""
    rows = [
        [
            each.function,
            each.direction,
            number(each.calls_per_s),
            str(each.calls),
            str(each.errors),
            seconds(each.p50_s),
            seconds(each.p99_s),
        ]
        for each in rates[:_MOST_FUNCTIONS]
    ]
    return Table("functions", "function dir calls/s calls errors p50 p99".split(), rows, 2)


def worker_tables(report: Report, peers: Iterable[PeerRate]) -> list[Table]:
    """Returns the tables of one worker: bytes by peer and channel, calls, references, events."""
    moved = [
        [
            each.worker,
            each.channel,
            size(each.sent_per_s),
            size(each.received_per_s),
            size(each.sent),
            size(each.received),
        ]
        for each in peers
    ]
    made = [
        [each.function, each.callee, seconds(each.age_s), each.parent]
        for each in report.made[:_MOST_CALLS]
    ]
    served = [
        [each.function, each.caller, seconds(each.age_s), "runs" if each.has_begun else "queued"]
        for each in report.served[:_MOST_CALLS]
    ]
    references = [
        [each.reference, each.owner, size(each.size_bytes) if each.size_bytes else "", each.made_at]
        for each in report.references
    ]
    events = [[f"{each.age_s:.1f} s ago", each.text] for each in report.events]
    tables = [
        Table("other workers", "worker channel sent/s recv/s sent received".split(), moved, 2),
        Table("open calls", "function callee age in-call".split(), made, 2, has_text_last=True),
        Table("served calls", "function caller age state".split(), served, 2, has_text_last=True),
        Table(
            "references", "reference owner bytes made".split(), references, 2, has_text_last=True
        ),
        Table("events", "when what".split(), events, 2),
    ]
    return [table for table in tables if table.rows]


def number_tables(reports: Iterable[Report]) -> list[Table]:
    """Returns the tables that components of workers tell, with a column for the worker."""
    found: dict[tuple[str, tuple[str, ...]], list[tuple[str, NumberRow]]] = {}
    for report in reports:
        for table in report.numbers:
            rows = found.setdefault((table.title, table.labels), [])
            rows += [(report.worker, row) for row in table.rows]
    return [_number_table(*key, rows) for key, rows in found.items() if rows]


def _number_table(
    title: str, labels: tuple[str, ...], rows: Sequence[tuple[str, NumberRow]]
) -> Table:
    names = list(dict.fromkeys(name for _, row in rows for name in row.numbers))
    drawn_names = list(dict.fromkeys(name for _, row in rows for name in row.histograms))
    cells = [
        [
            worker,
            *row.labels,
            *(_cell(name, row.numbers.get(name, math.nan)) for name in names),
            *(_shares(row.histograms.get(name, {})) for name in drawn_names),
        ]
        for worker, row in rows
    ]
    heads = [each.removesuffix(" bytes").removesuffix(" share") for each in names]
    columns = ["worker", *labels, *heads, *drawn_names]
    return Table(title, columns, cells, 1 + len(labels), has_text_last=bool(drawn_names))


def _cell(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("share"):
        return "-" if math.isnan(value) else f"{value:.1%}"
    return "-" if math.isnan(value) else f"{value:,.0f}"


def _shares(counts: Mapping[str, int]) -> str:
    """Returns a histogram in one line, the most frequent values first."""
    total = sum(counts.values())
    frequent = sorted(counts.items(), key=lambda pair: (-pair[1], int(pair[0])))[:_MOST_VALUES]
    rest = total - sum(count for _, count in frequent)
    shown = [f"{value}: {count / total:.0%}" for value, count in frequent]
    return ", ".join([*shown, f"others: {rest / total:.0%}"] if rest else shown)


def histograms(report: Report) -> list[Table]:
    """Returns the histograms that components of a worker tell, drawn."""
    tables = []
    for table in report.numbers:
        for row in table.rows:
            for name, counts in row.histograms.items():
                title = f"{name} of {table.title}: {', '.join(row.labels)}"
                tables.append(
                    Table(
                        title,
                        (name, "count", "share", "drawn"),
                        bars(counts),
                        0,
                        has_text_last=True,
                    )
                )
    return [each for each in tables if each.rows]


def bars(counts: Mapping[str, int]) -> list[list[str]]:
    """Returns a row for each value of a histogram, or for each range of values if there are many:
    the value, how often it was observed, its share, and a bar.
    """
    if not counts:
        return []
    values = sorted((int(value), count) for value, count in counts.items())
    first, width = values[0][0], max(1, -(-(values[-1][0] - values[0][0] + 1) // _MOST_BARS))
    by_range: dict[int, int] = {}
    for value, count in values:
        place = (value - first) // width
        by_range[place] = by_range.get(place, 0) + count
    total, largest = sum(by_range.values()), max(by_range.values())
    rows = []
    for place in range(max(by_range) + 1):
        count, low = by_range.get(place, 0), first + place * width
        span = str(low) if width == 1 else f"{low}-{low + width - 1}"
        bar = "#" * round(_BAR_WIDTH * count / largest) or "." * (count > 0)
        rows.append([span, f"{count:,}", f"{count / total:.1%}", bar])
    return rows


def stacks(report: Report) -> str:
    """Returns the stacks of a worker's threads; those without work last."""
    lines = []
    for thread in sorted(report.threads, key=lambda thread: thread.is_idle):
        waits = ", ".join(
            f"{wait.name} ({', '.join(wait.workers)}) for {seconds(wait.age_s)}"
            for wait in thread.waits
        )
        state = ": idle" if thread.is_idle else f", waits for {waits}:" if waits else ":"
        lines += [f"{thread.name}{state}", *thread.frames]
    return "\n".join(lines)


def show(parts: Iterable[Table | str]) -> None:
    """Prints tables and texts, an empty line between them."""
    told = [part for part in parts if part]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            console = Console(highlight=False, markup=False, emoji=False)
            for place, part in enumerate(told):
                if place:
                    console.print()
                console.print(part if isinstance(part, str) else _fitting(part, console))
            return
    print(plain(told))


def plain(parts: Iterable[Table | str]) -> str:
    """Returns tables and texts as plain text, an empty line between them."""
    return "\n\n".join([each if isinstance(each, str) else drawn(each) for each in parts])


def _fitting(table: Table, console: Console) -> Grid:
    """Returns a table for a terminal; if it is too wide, with its rows as columns if these fit."""
    whole = grid(table)
    heads, *rows = zip(table.heads, *table.rows, strict=True) if table.heads else [()]
    for each in (whole, grid(Table(table.title, heads, rows, 1))) if rows else ():
        wanted = console.measure(each, options=console.options.update(max_width=_WIDEST))
        if wanted.maximum <= console.width:
            return each
    return whole


def grid(table: Table) -> Grid:
    """Returns a table for rich."""
    from rich.table import Table as Grid
    from rich.text import Text

    made = Grid(
        title=Text(table.title, "bold") if table.title else None,
        title_justify="left",
        show_header=bool(table.heads),
        header_style="bold",
        box=None,
        pad_edge=False,
    )
    columns = table.heads or ("",) * max(map(len, table.rows), default=0)
    for head, is_text in zip(columns, table.at_left(), strict=True):
        made.add_column(Text(head), justify="left" if is_text else "right", overflow="fold")
    for row in table.rows:
        made.add_row(*map(Text, row), style=style_of(row))
    return made


def style_of(row: Sequence[str]) -> str:
    """Returns the style of a row: that of something bad, or none."""
    return "bold red" if {LOST, SILENT, ERROR} & set(row[:3]) else ""


def drawn(table: Table) -> str:
    """Returns a table as plain text."""
    heads = [list(table.heads)] if table.heads else []
    lines = aligned([*heads, *map(list, table.rows)], table.at_left()) if table.rows else []
    return "\n".join([table.title, *lines] if table.title else lines)


def seconds(value: float) -> str:
    """Returns a time for people; "-" for NaN."""
    if value < 1e-3:
        return f"{number(value * 1e6)} us"
    if value < 1.0:
        return f"{number(value * 1e3)} ms"
    return "-" if math.isnan(value) else f"{value:.1f} s"


def size(count: float) -> str:
    """Returns bytes for people; "-" for NaN."""
    place = 0
    while count >= 1000 and place < len(_UNITS) - 1:
        count, place = count / 1000, place + 1
    if math.isnan(count):
        return "-"
    return f"{number(count)} {_UNITS[place]}" if place else f"{count:.0f} B"


def number(value: float) -> str:
    """Returns a number for people, with two digits at least; "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def share(value: float) -> str:
    """Returns a share of a core for people; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.0%}"


WORKER_COLUMNS = (
    WorkerColumn("worker", lambda each: each.worker, lambda each: each.report.identity.rank),
    _numbers("host", "report.identity.host"),
    WorkerColumn("state", lambda _: "up", lambda _: "up"),
    _numbers("cpu", "cpu", share),
    _numbers("memory", "report.memory_bytes", size),
    _numbers("in/s", "in_per_s", number),
    _numbers("out/s", "out_per_s", number),
    _numbers("p50", "p50_s", seconds),
    _numbers("p99", "p99_s", seconds),
    _numbers("flight", "report.in_flight"),
    _numbers("serving", "report.serving"),
    _numbers("queued", "report.queued"),
    _numbers("sent/s", "sent_per_s", size),
    _numbers("recv/s", "received_per_s", size),
    _numbers("owned", "report.owned"),
    _numbers("held", "report.held"),
    _numbers("ctx", "report.contexts"),
    _numbers("passes", "report.passes"),
    WorkerColumn("blocked-by", _blocked_text, _blocked_s),
)
"""The columns of ``workers_table``."""
