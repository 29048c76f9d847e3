from __future__ import annotations

import io

import pytest

from torchweft.observe.text import Table

console_module = pytest.importorskip("rich.console")

from torchweft.observe.live import fitting, picture, show  # noqa: E402

HEADS = ("worker", "host", "state", "in/s", "sent/s", "serving", "blocked-by")
ROWS = [
    ["worker0", "here", "up", "12", "3.0 kB", "4", "worker1 3.0 s"],
    ["b", "", "lost", "", "", "", ""],
]


class Seen:
    title = "group cafe, 2 workers"

    def tables(self) -> list[Table]:
        functions = Table("functions", ("function", "calls"), [["f", "1"]], 1)
        return [Table("", HEADS, ROWS, 3), functions]

    def notes(self) -> list[str]:
        return ["b is lost"]

    def stacks(self) -> str:
        return "MainThread: [idle]"


def drawn(width: int) -> str:
    out = io.StringIO()
    console = console_module.Console(file=out, width=width, markup=False, highlight=False)
    console.print(picture(Seen(), width))
    return out.getvalue()


def test_everything_is_shown() -> None:
    lines = drawn(120)
    for part in ("group cafe, 2 workers", "b is lost", "worker1 3.0 s", "functions", "[idle]"):
        assert part in lines
    assert all(len(line) <= 120 for line in lines.splitlines())


def test_a_narrow_terminal_leaves_out_what_matters_least() -> None:
    lines = drawn(50)
    assert "serving" not in lines
    assert "blocked-by" in lines
    assert "12" in lines


def test_a_column_that_is_left_out_takes_its_cells_along() -> None:
    table = fitting(Table("", HEADS, ROWS, 3), 45)
    assert "host" not in table.heads
    assert len(set(map(len, [table.heads, *table.rows]))) == 1
    assert table.left == 2


def test_it_looks_until_it_is_interrupted() -> None:
    looks = []

    def look() -> Seen:
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt
        return Seen()

    out = io.StringIO()
    console = console_module.Console(file=out, width=100, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        show(look, 0.0, console)
    assert out.getvalue().count("group cafe") == 2
