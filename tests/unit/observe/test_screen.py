"""The live display, driven by keys and a source without workers."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("textual")

from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Static, TabbedContent

from tests.reports import made, report, thread
from torchweft.observe import text
from torchweft.observe.group import Answers
from torchweft.observe.looking import Look, look_at
from torchweft.observe.screen import Opened, Overview, TopApp
from torchweft.reports import FunctionCounts, NumberRow, NumberTable, Traffic

WORKERS = 24
LIMIT_S = 50.0


def seen(number: int, opened: str | None) -> Look:
    """Returns a look at many simulated workers, the one of that number."""
    reports = []
    row = NumberRow(("tables",), {"rows": 17}, {})
    for rank in range(WORKERS):
        name = f"worker{rank}"
        counts = (FunctionCounts("train.step", "out", rank * number, 0, {"-80": 1}),)
        one = report(
            name,
            thread(frames=("  in train.step",)),
            functions=counts,
            made=(made(name, 1, "worker0"),),
            traffic=(Traffic("worker0", 1000 * number, 10, {"sent shm": 5000 * number}),),
            numbers=(NumberTable("tables", ("table",), (row,)),),
        )
        identity = replace(one.identity, rank=rank, host=f"host{rank % 4}")
        reports.append(replace(one, identity=identity, clock_s=float(number), owned=rank % 7))
    before = {each.worker: replace(each, clock_s=each.clock_s - 1.0) for each in reports}
    answers = Answers(reports, {"gone": "is lost: killed"}, {"gone"})
    return look_at(f"group cafe, look {number}", answers, before, opened)


class Source:
    """Looks when it is told to."""

    def __init__(self) -> None:
        self.looks: list[str | None] = []
        self.looked = threading.Semaphore(0)

    def look(self, worker: str | None = None) -> Look:
        self.looks.append(worker)
        return seen(len(self.looks), worker)

    def waits(self) -> str:
        return "deadlock: worker1 and worker2 wait for each other"


def drive(play: Callable[[TopApp, Pilot[None]], Awaitable[None]], **options: Any) -> Source:
    """Runs the display without a terminal, and plays keys on it."""
    source = Source()
    size = options.pop("size", (150, 40))

    async def run() -> None:
        app = TopApp(source, options.pop("interval_s", 3600.0), **options)
        async with app.run_test(size=size) as pilot:
            await play(app, pilot)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    return source


async def shown(app: TopApp, pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    while not is_so():  # Bounded by the limit of the whole run.
        await pilot.pause(0.01)


def table(app: TopApp, name: str) -> DataTable[Any]:
    return app.screen.query_one(f"#{name}", DataTable)


def names(app: TopApp) -> list[str]:
    return [str(row.key.value) for row in table(app, "workers").ordered_rows]


def test_all_workers_are_shown_and_sorted() -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        await shown(app, pilot, lambda: table(app, "workers").row_count == WORKERS + 1)
        assert names(app)[:2] == ["worker0", "worker1"]
        assert names(app)[-1] == "gone"
        owned = [column.head for column in text.WORKER_COLUMNS].index("owned")
        app.screen.action_sort(owned - 1)  # type: ignore[attr-defined]
        await pilot.press("s")
        rows = names(app)
        ranks = [int(name.removeprefix("worker")) for name in rows[:-1]]
        assert [rank % 7 for rank in ranks] == sorted([rank % 7 for rank in ranks], reverse=True)
        assert rows[-1] == "gone"
        await pilot.press("r")
        assert names(app)[0] == "worker0"
        title = str(app.screen.query_one("#title", Static).content)
        assert "by owned" in title
        assert "gone is lost" in str(app.screen.query_one("#notes", Static).content)

    drive(play)


def test_a_worker_is_opened_and_closed() -> None:
    async def play(app: TopApp, pilot: Pilot[None]) -> None:
        await shown(app, pilot, lambda: bool(names(app)))
        await pilot.press("down", "down", "enter")
        await shown(app, pilot, lambda: isinstance(app.screen, Opened))
        peers = app.screen.query_one("#table-other-workers", DataTable)
        await shown(app, pilot, lambda: peers.row_count == 2)
        assert [str(each) for each in peers.get_row_at(0)][:2] == ["worker0", "shm"]
        panes = app.screen.query_one(TabbedContent)
        assert str(panes.get_tab("open-calls").label) == "open calls (1)"
        stacks = str(app.screen.query_one("#all-stacks", Static).content)
        assert "in train.step" in stacks
        numbers = app.screen.query_one("#all-numbers", Static).content
        console = Console(file=io.StringIO())
        console.print(numbers)
        assert "17" in console.file.getvalue()  # type: ignore[attr-defined]
        await pilot.press("escape")
        await shown(app, pilot, lambda: isinstance(app.screen, Overview))

    assert set(drive(play).looks) == {None, "worker2"}
