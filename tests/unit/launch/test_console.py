from __future__ import annotations

import io
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import LaunchError
from torchweft.launch.console import (
    CLEAR_LINE,
    BinarySink,
    Console,
    InterpreterSink,
    Label,
    LineAssembler,
)

FIRST = Label("ps", 0, 7)
SECOND = Label("trainer", 1, 7)


class MemorySink:
    def __init__(self, *, is_terminal: bool) -> None:
        self.text = b""
        self._is_terminal = is_terminal

    def write(self, data: bytes) -> None:
        self.text += data

    def is_terminal(self) -> bool:
        return self._is_terminal


def make_console(*, is_terminal: bool, **environment: str) -> tuple[Console, MemorySink]:
    sink = MemorySink(is_terminal=is_terminal)
    return Console(sink, sink, environment), sink


def test_a_prompt_is_written_anew_when_its_line_goes_on() -> None:
    made, sink = make_console(is_terminal=True, NO_COLOR="1")
    made.show_partial(FIRST, b"name? ", is_error=False)
    made.write_lines(FIRST, [b"name? none"], is_error=False)
    assert sink.text == b"[ps]      name? " + CLEAR_LINE + b"[ps]      name? none\n"


def test_another_worker_does_not_write_into_a_prompt() -> None:
    made, sink = make_console(is_terminal=True, NO_COLOR="1")
    made.show_partial(FIRST, b"name? ", is_error=False)
    made.write_lines(SECOND, [b"loss 1"], is_error=False)
    made.announce("the end")
    assert sink.text == b"[ps]      name? \n[trainer] loss 1\nthe end\n"


def test_a_replaced_standard_output_is_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    InterpreterSink("stdout").write("grüße\n".encode() + b"\xff\n")
    assert capsys.readouterr().out == "grüße\n\ufffd\n"


def test_at_the_prompt_whole_lines_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert InterpreterSink("stdout").is_terminal()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert not InterpreterSink("stdout").is_terminal()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# The lines of one stream


OUTPUT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b" "])).map(b"".join)


def assemble(pieces: list[bytes]) -> list[bytes]:
    assembler = LineAssembler()
    completed = [line for piece in pieces for line in assembler.feed(piece)]
    return completed + assembler.finish()


@given(OUTPUT, st.data())
def test_how_output_is_cut_into_pieces_does_not_matter(output: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)))))
    bounds = [0, *cuts, len(output)]
    pieces = [output[start:end] for start, end in itertools.pairwise(bounds)]
    assert assemble(pieces) == assemble([output])


@given(st.lists(st.binary().filter(lambda line: not {10, 13} & set(line))), st.booleans())
def test_lines_without_carriage_returns_come_out_as_they_went_in(
    written: list[bytes], has_last_newline: bool
) -> None:
    output = b"\n".join(written) + (b"\n" if has_last_newline else b"")
    assert b"\n".join(assemble([output])) == output.removesuffix(b"\n")


def test_a_partial_line_is_shown_as_a_terminal_would() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"whole\n10%\r20") == [b"whole"]
    assert assembler.partial == b"20"
    assembler.feed(b"%\r")
    assert assembler.partial == b"20%"


def test_an_endless_progress_bar_takes_no_memory() -> None:
    assembler = LineAssembler()
    for number in range(1000):
        assembler.feed(b"\r%d" % number)
    assert assembler._unfinished == b"999"


def test_output_that_cannot_be_written_is_one_error_and_then_dropped() -> None:
    with open("/dev/full", "wb") as full:
        sink = BinarySink(full)
        with pytest.raises(LaunchError, match="cannot be written: No space left on device"):
            sink.write(b"one\n")
        sink.write(b"two\n")
