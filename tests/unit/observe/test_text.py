from __future__ import annotations

import math
import re

import pytest

from tests.reports import calling, made, report, served, thread
from torchweft.observe import text
from torchweft.observe.rates import peers, rate
from torchweft.reports import Event, HeldReference, NumberRow, NumberTable, Traffic


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2e-6, "2.0 us"), (45e-6, "45 us"), (0.0021, "2.1 ms"), (0.5, "500 ms"), (12.34, "12.3 s"),
     (math.nan, "-")],
)  # fmt: skip
def test_times_have_fitting_units(value: float, shown: str) -> None:
    assert text.seconds(value) == shown


def test_the_overview_has_a_row_for_each_worker_and_each_silent_one() -> None:
    waiting = report("a", thread(waits=(calling("a", 1, "b", 3.0),)))
    table = text.workers_table([rate(waiting, None)], {"b": "is lost", "c": "is mute"}, {"b"})
    rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    assert [row["state"] for row in rows] == ["up", "lost", "silent"]
    assert rows[0]["blocked-by"] == "b 3.0 s"
    assert rows[0]["cpu"] == rows[0]["out/s"] == "-"


def test_an_opened_worker_shows_its_calls_references_and_events() -> None:
    opened = report(
        "a",
        thread(frames=('  File "p.py", line 1, in f',), waits=(calling("a", 1, "b", 3.0),)),
        thread("weft-a-1", is_idle=True),
        made=(made("a", 1, "b"),),
        served=(served("b", 7, has_begun=False),),
        traffic=(Traffic("b", 5, 7, {"sent shm": 9}),),
        references=(HeldReference("R", "a", "p.py:3 by ones", 4000),),
        events=(Event(2.0, "worker 'b' is lost"),),
    )
    shown = "\n".join(map(text.drawn, text.worker_tables(opened, peers(opened, None))))
    for part in ("program.work", "queued", "shm", "9 B", "p.py:3 by ones", "4.0 kB", "is lost"):
        assert part in shown
    stacks = text.stacks(opened)
    assert stacks.startswith('MainThread, waits for work (b) for 3.0 s:\n  File "p.py"')
    assert stacks.endswith("weft-a-1: idle")


def rows_of(title: str, *rows: NumberRow) -> tuple[NumberTable, ...]:
    return (NumberTable(title, ("table",), rows),)


def test_numbers_of_components_are_in_one_table_for_all_workers() -> None:
    first = NumberRow(
        ("words",), {"ids": 1200, "unique share": 0.255}, {"staleness": {"0": 3, "2": 1}}
    )
    second = NumberRow(("days",), {"ids": 7, "sent bytes": 2500}, {})
    reports = [
        report("a", numbers=rows_of("lookups", first)),
        report("b", numbers=rows_of("lookups", second)),
        report("c"),
    ]
    (table,) = text.number_tables(reports)
    assert text.drawn(table).splitlines() == [
        "lookups",
        "worker  table    ids  unique    sent  staleness",
        "a       words  1,200   25.5%       -  0: 75%, 2: 25%",
        "b       days       7       -  2.5 kB",
    ]
    (drawn,) = text.histograms(reports[0])
    assert text.drawn(drawn).splitlines() == [
        "staleness of lookups: words",
        "staleness  count  share  drawn",
        f"        0      3  75.0%  {'#' * 40}",
        "        1      0   0.0%",
        f"        2      1  25.0%  {'#' * 13}",
    ]
    assert text.histograms(reports[1]) == []


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the printed lines without styles."""
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
