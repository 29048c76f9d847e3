"""What a person sees on a terminal, by way of one that is made up here."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TextIO

import pytest

from torchweft.mapreduce.display.terminal import Terminal


class Screen(io.StringIO):
    """A terminal that knows what is used of one: new lines, clearing, and going up."""

    def __init__(self, rows: int = 100) -> None:
        super().__init__()
        self.height = rows
        self.scrolled: list[str] = []
        self.cells = [""] * rows
        self.row = self.column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for token in re.findall(r"\x1b\[\d*[A-Z]|.", text, re.DOTALL):
            self.take(token)
        return len(text)

    def take(self, token: str) -> None:
        if token == "\r":
            self.column = 0
        elif token == "\n":
            self.go_down()
        elif token.startswith("\x1b["):
            self.obey(token[-1], int(token[2:-1] or 0))
        else:
            line = self.cells[self.row].ljust(self.column)
            self.cells[self.row] = line[: self.column] + token + line[self.column + 1 :]
            self.column += 1

    def go_down(self) -> None:
        self.column = 0
        self.row += 1
        if self.row == self.height:
            self.scrolled.append(self.cells.pop(0))
            self.cells.append("")
            self.row -= 1

    def obey(self, command: str, number: int) -> None:
        if command == "A":
            self.row = max(0, self.row - number)
            return
        self.cells[self.row] = self.cells[self.row][: self.column]
        if command == "J":
            self.cells[self.row + 1 :] = [""] * (self.height - self.row - 1)
        else:
            assert command == "K"

    @property
    def seen(self) -> list[str]:
        """All lines, also those that have left the screen at the top."""
        return "\n".join([*self.scrolled, *self.cells]).rstrip("\n").split("\n")


class Terminals:
    """Standard output and standard error on one screen.

    No fixture: pytest puts streams of its own in their place before a test begins.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int = 100) -> None:
        self.screen = Screen(rows)
        monkeypatch.setattr(sys, "stdout", self.screen)
        monkeypatch.setattr(sys, "stderr", self.screen)
        self.terminal = Terminal(self.screen)


def test_lines_take_the_place_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    terminals.terminal.show(["one and more", "two", "three"])
    terminals.terminal.show(["uno", "dos"])
    assert terminals.screen.seen == ["", "uno", "dos"]
    assert (terminals.screen.row, terminals.screen.column) == (0, 0)
    terminals.terminal.close()
    assert terminals.screen.seen == [""]


def test_what_is_printed_stands_above(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    terminals.terminal.show(["one", "two"])
    print("printed")
    sys.stderr.writelines(["and", " so on\n"])
    terminals.terminal.print("this stays")
    assert terminals.screen.seen == ["printed", "and so on", "this stays", "", "one", "two"]
    terminals.terminal.show(["uno"])
    assert terminals.screen.seen == ["printed", "and so on", "this stays", "", "uno"]
    terminals.terminal.close()
    assert terminals.screen.seen == ["printed", "and so on", "this stays"]


def test_a_line_that_others_have_begun_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    terminals.terminal.show(["one", "two"])
    print("your name? ", end="")
    terminals.terminal.show(["uno"])
    assert terminals.screen.seen == ["your name? "]
    print("Ada")
    terminals.terminal.show(["uno"])
    assert terminals.screen.seen == ["your name? Ada", "", "uno"]
    terminals.terminal.close()


def test_what_stays_begins_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    terminals.terminal.show(["one"])
    print("begun", end="")
    terminals.terminal.print("this stays")
    print("begun", end="")
    terminals.terminal.close()
    terminals.terminal.print("the end")
    assert terminals.screen.seen == ["begun", "this stays", "begun", "the end"]


def test_one_line_past_the_stand_in_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a logging handler that was made earlier writes, or another process."""
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    terminals.terminal.show(["one", "two"])
    terminals.screen.write("logged\n")
    terminals.terminal.show(["one", "two"])
    assert terminals.screen.seen == ["logged", "", "one", "two"]
    terminals.terminal.close()


def test_at_the_bottom_of_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch, rows=5)
    terminals.terminal.open()
    for number in range(10):
        print(number)
        terminals.terminal.show(["one", f"two {number}", "three"])
    assert terminals.screen.seen == [*"0123456789", "", "one", "two 9", "three"]
    terminals.terminal.close()
    assert terminals.screen.seen == [*"0123456789"]


def test_streams_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    assert sys.stdout is not terminals.screen
    kept: TextIO = sys.stdout
    assert kept.isatty()
    terminals.terminal.close()
    assert sys.stdout is terminals.screen
    assert sys.stderr is terminals.screen
    kept.write("by somebody who kept it\n")
    assert terminals.screen.seen == ["by somebody who kept it"]


def test_a_stream_that_somebody_else_has_replaced_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    sys.stdout = theirs = io.StringIO()
    terminals.terminal.close()
    assert sys.stdout is theirs


def test_a_stream_into_a_file_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", None)  # as under a windowing system
    terminal = Terminal(Screen())
    terminal.open()
    terminal.show(["one"])
    print("printed")
    terminal.close()
    assert sys.stdout.getvalue() == "printed\n"


def test_one_display_within_another(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    terminals.terminal.show(["outer"])
    inner = Terminal(sys.stderr)
    inner.open()
    inner.show(["inner"])
    terminals.terminal.show(["outer"])
    print("printed")
    assert terminals.screen.seen == ["printed", "", "inner"]
    inner.close()
    inner.print("inner is done")
    assert terminals.screen.seen == ["printed", "inner is done", "", "outer"]
    terminals.terminal.close()
    assert sys.stderr is terminals.screen


def test_a_forked_process_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)
    terminals.terminal.open()
    terminals.terminal.show(["one"])
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        patched.delattr(terminals.terminal, "_lock")
        print("from the child")
    terminals.terminal.close()
    assert terminals.screen.seen == ["from the child"]


def test_a_terminal_that_has_gone_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminals = Terminals(monkeypatch)

    def fail() -> None:
        raise OSError("hung up")

    gone = Screen()
    terminal = Terminal(gone)
    terminal.open()
    terminal.show(["one"])
    monkeypatch.setattr(gone, "flush", fail)
    terminal.show(["two"])
    print("the program goes on")
    terminal.close()
    terminal.print("the end")
    assert terminals.screen.seen == ["the program goes on"]


def test_characters_that_the_terminal_does_not_have(tmp_path: os.PathLike[str]) -> None:
    with open(os.path.join(tmp_path, "out"), "w+", encoding="ascii") as out:
        Terminal(out).print("ünï")
        out.seek(0)
        assert out.read() == "?n?\n"


def test_the_size_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(descriptor: int) -> os.terminal_size:
        asked.append(descriptor)
        return os.terminal_size((63, 17))

    monkeypatch.setattr(os, "get_terminal_size", answer)
    with open(os.devnull, "w") as out:
        assert Terminal(out).size() == (63, 17)
        assert asked == [out.fileno()]


def test_the_size_of_what_has_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "63")
    monkeypatch.setenv("LINES", "17")
    assert Terminal(io.StringIO()).size() == (63, 17)
