"""The live display of ``torchweft top``, on a terminal or in a browser, drawn with Textual.

A thread asks the workers, as answers may take as long as the timeout; the display itself never
waits. Only ``torchweft top`` imports this.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static, TabbedContent, TabPane

from torchweft.observe import text
from torchweft.observe.looking import Look, Looker
from torchweft.observe.rates import WorkerRate

Cells = DataTable[Text]

FUNCTIONS, NUMBERS, STACKS = "functions", "numbers", "stacks"
_TABLES = (FUNCTIONS, "other workers", "open calls", "served calls", "references", "events")
_LAST_TEXT = 2
"""Of the columns of workers, the last with text."""


class TopApp(App[None]):
    """Shows a group until it is ended.

    Args:
        source: Looks at the group, in a thread of its own.
        interval_s: Seconds between two looks.
        worker: The worker to open at first, if any.
    """

    TITLE = "torchweft top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { height: 1; text-style: bold; }
    #notes { height: auto; max-height: 6; color: $error; text-style: bold; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    #workers { height: 1fr; }
    #more { height: auto; max-height: 33%; }
    #more DataTable, #more VerticalScroll { height: auto; max-height: 12; }
    TabPane { padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit")]

    def __init__(self, source: Looker, interval_s: float, worker: str | None = None) -> None:
        super().__init__()
        self.source = source
        self._interval_s = interval_s
        self._first = worker
        self._must_look = threading.Event()
        self._has_ended = threading.Event()

    def get_default_screen(self) -> Screen[None]:
        """Returns the screen with all workers."""
        return Overview()

    def on_mount(self) -> None:
        """Opens the worker that was asked for, and begins to look."""
        if self._first is not None:
            self.push_screen(Opened(self._first))
        self.run_worker(self._follow, thread=True, exit_on_error=True)

    def on_unmount(self) -> None:
        """Ends the looks."""
        self._has_ended.set()
        self._must_look.set()

    def look_soon(self) -> None:
        """Has the next look taken at once."""
        self._must_look.set()

    def _follow(self) -> None:
        """Looks again and again, in a thread of its own."""
        while not self._has_ended.is_set():
            began_s = time.monotonic()
            self._must_look.clear()
            screen = self.screen
            opened = screen.worker if isinstance(screen, Opened) else None
            seen = self.source.look(opened)
            if self._has_ended.is_set():
                return
            self.call_from_thread(self._show, opened, seen)
            self._must_look.wait(max(self._interval_s - (time.monotonic() - began_s), 0.0))

    def _show(self, opened: str | None, seen: Look) -> None:
        screen = self.screen
        if not isinstance(screen, (Overview, Opened)) or screen.worker != opened:
            return  # Another screen was opened meanwhile; the next look is for that one.
        if screen.is_mounted:
            with contextlib.suppress(NoMatches):  # The screen ends, and has lost parts of it.
                screen.show(seen)


class Overview(Screen[None]):
    """All workers, and their most frequent functions."""

    worker: str | None = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort by the next column"),
        Binding("S", "sort(-1)", "Previous column", show=False),
        Binding("r", "reverse", "Reverse"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("w", "waits", "Waits"),
        Binding("escape", "all", "All workers", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._seen: Look | None = None
        self._column = 0
        self._is_reversed = False
        self._wanted = ""

    def compose(self) -> ComposeResult:
        """Yields the parts of the screen."""
        yield Static("torchweft top: asking the workers", id="title", markup=False)
        yield Static("", id="notes", markup=False)
        yield Input(
            placeholder="names of workers or hosts; Enter keeps it, Escape ends", id="filter"
        )
        yield DataTable(id="workers", cursor_type="row", fixed_columns=1)
        with TabbedContent(id="more"):
            with TabPane(FUNCTIONS, id="more-functions"):
                yield DataTable(id="functions", cursor_type="row")
            with TabPane(NUMBERS, id="more-numbers"):
                yield _text("numbers")
        yield Footer()

    def on_mount(self) -> None:
        """Puts the cursor on the workers, and has them asked at once."""
        self.query_one("#workers").focus()
        _top(self).look_soon()

    def show(self, seen: Look) -> None:
        """Shows the last look."""
        self._seen = seen
        column = text.WORKER_COLUMNS[self._column]
        order = f"by {column.head}{', largest first' if self._is_reversed else ''}"
        chosen = f", those with {self._wanted!r}" if self._wanted else ""
        self.query_one("#title", Static).update(
            f"torchweft top: {seen.title}, {time.strftime('%H:%M:%S')}, {order}{chosen}"
        )
        self.query_one("#notes", Static).update("\n".join(seen.notes))
        rows = self._in_order(seen.workers.rows, seen.rates)
        workers = seen.workers._replace(rows=rows)
        fill(self.query_one("#workers", DataTable), workers, has_names=True)
        fill(self.query_one("#functions", DataTable), text.functions_table(seen.functions))
        self.query_one("#numbers", Static).update(_numbers(seen))

    def _in_order(
        self, rows: Sequence[Sequence[str]], rates: Sequence[WorkerRate]
    ) -> list[Sequence[str]]:
        value_of = text.WORKER_COLUMNS[self._column].value
        values = {each.worker: value_of(each) for each in rates}
        wanted = [row for row in rows if any(self._wanted in cell for cell in row[:2])]
        known = [row for row in wanted if row[0] in values]
        known.sort(key=lambda row: _comparable(values[row[0]]), reverse=self._is_reversed)
        return known + [row for row in wanted if row[0] not in values]

    def _again(self) -> None:
        if self._seen is not None:
            self.show(self._seen)

    def action_sort(self, step: int) -> None:
        """Sorts by the next or previous column."""
        self._column = (self._column + step) % len(text.WORKER_COLUMNS)
        self._is_reversed = self._column > _LAST_TEXT  # Of numbers the largest come first.
        self._again()

    def action_reverse(self) -> None:
        """Turns the order round."""
        self._is_reversed = not self._is_reversed
        self._again()

    def action_filter(self) -> None:
        """Asks for a part of the names to show."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_all(self) -> None:
        """Shows all workers again."""
        self.query_one("#filter", Input).value = ""
        self._close_filter()

    def action_waits(self) -> None:
        """Opens the waits."""
        self.app.push_screen(Waits())

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while the text is typed."""
        self._wanted = event.value
        self._again()

    def on_input_submitted(self) -> None:
        """Keeps the filter."""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").remove_class("shown")
        self.query_one("#workers").focus()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sorts by the column whose head was clicked, or turns its order round."""
        if event.data_table.id != "workers":
            return
        if event.column_index == self._column:
            self.action_reverse()
        else:
            self.action_sort(event.column_index - self._column)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Opens the worker at the cursor."""
        if event.data_table.id == "workers" and event.row_key.value is not None:
            self.app.push_screen(Opened(event.row_key.value))


class Opened(Screen[None]):
    """One worker: its functions, bytes, calls, references, events and stacks.

    Args:
        worker: Its name.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "back", "All workers")]

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.worker = worker

    def compose(self) -> ComposeResult:
        """Yields the parts of the screen."""
        yield Static(f"torchweft top: asking {self.worker}", id="title", markup=False)
        yield Static("", id="notes", markup=False)
        with TabbedContent():
            for name in _TABLES:
                with TabPane(name, id=_id(name)):
                    yield DataTable(id=f"table-{_id(name)}", cursor_type="row")
            for name in (NUMBERS, STACKS):
                with TabPane(name, id=name):
                    yield _text(f"all-{name}")
        yield Footer()

    def on_mount(self) -> None:
        """Has this worker asked at once."""
        _top(self).look_soon()

    def show(self, seen: Look) -> None:
        """Shows the last look."""
        facts = [
            f"{head} {cell}"
            for row in seen.workers.rows
            for head, cell in zip(seen.workers.heads, row, strict=True)
            if cell not in ("", "-") and head != "worker"
        ]
        self.query_one("#title", Static).update(f"{self.worker}: {', '.join(facts)}")
        self.query_one("#notes", Static).update("\n".join(seen.notes))
        tables = {table.title: table for table in seen.opened}
        tables[FUNCTIONS] = text.functions_table(seen.functions)
        panes = self.query_one(TabbedContent)
        for name in _TABLES:
            table = tables.get(name, text.Table(name, (), (), 0))
            fill(self.query_one(f"#table-{_id(name)}", DataTable), table)
            panes.get_tab(_id(name)).label = f"{name} ({len(table.rows)})"
        self.query_one("#all-numbers", Static).update(_numbers(seen))
        self.query_one("#all-stacks", Static).update(seen.stacks)

    def action_back(self) -> None:
        """Shows all workers again."""
        self.dismiss()
        _top(self).look_soon()


class Waits(Screen[None]):
    """Who waits for whom, and deadlocks."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "All workers"),
        Binding("w", "ask", "Ask again"),
    ]

    def compose(self) -> ComposeResult:
        """Yields the parts of the screen."""
        yield Static("torchweft top: who waits for whom", id="title", markup=False)
        yield _text("waits", "asking the workers")
        yield Footer()

    def on_mount(self) -> None:
        """Asks at once."""
        self.action_ask()

    def action_ask(self) -> None:
        """Asks the workers, in a thread of its own."""
        self.run_worker(self._ask, thread=True, exclusive=True)

    def _ask(self) -> None:
        found = _top(self).source.waits()
        self.app.call_from_thread(self._show, found)

    def _show(self, found: str) -> None:
        if self.is_mounted:
            self.query_one("#waits", Static).update(found)

    def action_back(self) -> None:
        """Shows all workers again."""
        self.dismiss()


def fill(table: Cells, content: text.Table, *, has_names: bool = False) -> None:
    """Shows rows in a table; the cursor stays at its row, and only cells that differ change.

    Args:
        table: The table.
        content: Its heads and rows.
        has_names: Whether the first cell names a row, so that rows may change their order.
    """
    if [column.value for column in table.columns] != list(content.heads):
        table.clear(columns=True)
        for head in content.heads:
            table.add_column(head, key=head)
    keys = [row[0] if has_names else str(at) for at, row in enumerate(content.rows)]
    shown = [str(row.key.value) for row in table.ordered_rows]
    at_cursor = shown[table.cursor_row] if shown else ""
    if sorted(keys) != sorted(shown):
        table.clear()
        for key, row in zip(keys, content.rows, strict=True):
            table.add_row(*_cells(content, row), key=key)
        if at_cursor in keys:
            table.move_cursor(row=keys.index(at_cursor))
        return
    for key, row in zip(keys, content.rows, strict=True):
        for head, cell in zip(content.heads, _cells(content, row), strict=True):
            if table.get_cell(key, head) != cell:
                table.update_cell(key, head, cell, update_width=True)
    if keys != shown:
        place = {key: at for at, key in enumerate(keys)}
        at_y = table.scroll_offset.y
        table.sort(content.heads[0], key=lambda cell: place[cell.plain])
        table.move_cursor(row=keys.index(at_cursor))
        # The table would follow its cursor, away from the first rows of the order.
        table.scroll_to(y=at_y, animate=False, force=True)
        table.call_after_refresh(table.scroll_to, y=at_y, animate=False, force=True)


def _cells(content: text.Table, row: Sequence[str]) -> list[Text]:
    style = text.style_of(row)
    return [
        Text(cell, style, justify="left" if is_text else "right")
        for cell, is_text in zip(row, content.at_left(), strict=True)
    ]


def _text(name: str, content: str = "") -> VerticalScroll:
    """Returns a text that is scrolled."""
    return VerticalScroll(Static(content, id=name, markup=False))


def _numbers(seen: Look) -> Group:
    return Group(*map(text.grid, seen.numbers))


def _comparable(value: Any) -> Any:
    return -math.inf if isinstance(value, float) and math.isnan(value) else value


def _id(name: str) -> str:
    return name.replace(" ", "-")


def _top(screen: Screen[None]) -> TopApp:
    app = screen.app
    assert isinstance(app, TopApp)
    return app
