from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from torchweft.launch import lines
from torchweft.launch.lines import LineAssembler

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


@given(OUTPUT)
def test_no_line_has_a_break_inside(output: bytes) -> None:
    assert not any({10, 13} & set(line) for line in assemble([output]))


def test_only_the_last_state_of_a_progress_bar_is_kept() -> None:
    assert assemble([b"\r10%", b"\r50%", b"\r100%\n", b"done\n"]) == [b"100%", b"done"]


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


def test_a_line_beyond_the_limit_is_broken() -> None:
    assembler = LineAssembler()
    size_bytes = lines.LINE_LIMIT_BYTES + 10
    assert [len(line) for line in assembler.feed(b"x" * size_bytes)] == [lines.LINE_LIMIT_BYTES]
    assert assembler.finish() == [b"x" * 10]
