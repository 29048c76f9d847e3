from __future__ import annotations

import math
import re

import pytest

from tests.reports import calling, made, report, served, thread
from torchweft.observe import text
from torchweft.observe.rates import functions, peers, rate
from torchweft.reports import Event, FunctionCounts, HeldReference, NumberRow, NumberTable, Traffic


def test_a_table_has_text_at_the_left_and_numbers_at_the_right() -> None:
    table = text.Table(
        "title", ("name", "n", "last"), [["a", "1", "x"], ["bcdef", "10", ""]], 1, True
    )
    assert text.drawn(table) == "title\nname    n  last\na       1  x\nbcdef  10"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2e-6, "2.0 us"), (45e-6, "45 us"), (0.0021, "2.1 ms"), (0.5, "500 ms"), (12.34, "12.3 s"),
     (math.nan, "-")],
)  # fmt: skip
def test_times_have_fitting_units(value: float, shown: str) -> None:
    assert text.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (25e6, "25 MB"), (3e15, "3000 TB"),
     (math.nan, "-")],
)  # fmt: skip
def test_sizes_have_fitting_units(value: float, shown: str) -> None:
    assert text.size(value) == shown


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


def test_functions_are_listed_by_their_calls() -> None:
    counts = (FunctionCounts("f", "out", 1, 0, {"0": 1}), FunctionCounts("g", "in", 5, 1, {"8": 5}))
    table = text.functions_table(functions([report("a", functions=counts)], {}))
    assert [row[0] for row in table.rows] == ["g", "f"]


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


def test_many_values_of_a_histogram_are_drawn_as_ranges() -> None:
    rows = text.bars({str(value): 1 for value in range(5, 55)} | {"99": 1000})
    assert [row[0] for row in rows[:2]] == ["5-9", "10-14"]
    assert len(rows) == 19
    assert rows[-1] == ["95-99", "1,000", "95.2%", "#" * 40]
    assert rows[0][1:] == ["5", "0.5%", "."]
    assert text.bars({}) == []


def test_a_table_that_is_too_wide_for_a_terminal_is_turned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    heads = ["worker", *[f"number {at}" for at in range(6)]]
    text.show(["title", text.Table("", heads, [["a", *"012345"], ["b", *"543210"]], 1)])
    lines = [line.rstrip() for line in printed(capsys)]
    assert lines[:4] == ["title", "", "worker    a  b", "number 0  0  5"]
    text.show([text.Table("", heads[:2], [["a", "0"], ["z" * 100, "5"]], 1)])
    lines = printed(capsys)
    assert max(map(len, lines)) <= 40
    assert sum(line.count("z") for line in lines) == 100


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the printed lines without styles."""
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
