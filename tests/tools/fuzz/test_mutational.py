from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fuzz import mutational
from tests.fuzz.campaign import Plan
from tests.fuzz.last_input import LastInput, read_last_input
from tests.fuzz.target import Target

VALID = b"\x05\x00hello"


def trusting(data: bytes) -> Exception | None:
    """Decodes a length and that many bytes, with a bug: it trusts the length."""
    if len(data) < 2:
        return ValueError("too short")
    size = int.from_bytes(data[:2], "little")
    for place in range(size):
        data[2 + place]
    return None if 2 + size == len(data) else ValueError("too long")


TOY = Target("toy", trusting, lambda: [VALID])


def test_a_decoder_that_trusts_a_length_is_found_out(tmp_path: Path) -> None:
    report = mutational.fuzz(TOY, Plan(2000, findings=tmp_path / "found"))
    assert report.findings == 1, "one place in the code, however many inputs get there"
    (told,) = (tmp_path / "found").glob("*.txt")
    data = told.with_suffix("").read_bytes()
    assert f'("toy", bytes.fromhex("{data.hex()}")),' in told.read_text()
    assert "IndexError" in told.read_text()
    try:
        trusting(data)
    except IndexError:
        return
    raise AssertionError("the input that was written shows nothing")


def test_the_same_plan_goes_the_same_way() -> None:
    first, second = (mutational.fuzz(TOY, Plan(500, seed=9)) for _ in range(2))
    assert (first.accepted, first.reached) == (second.accepted, second.reached)
    assert first.frames == 500


def test_the_input_that_ends_a_process_is_known(tmp_path: Path) -> None:
    last_input = LastInput(tmp_path / "last")
    mutational.fuzz(TOY, Plan(20), last_input)
    last_input.note(b"deadly")
    last_input.close()
    assert read_last_input(tmp_path / "last") == b"deadly"


def bare_trusting(data: bytes) -> bool:
    """Decodes as ``trusting``, as a twin in C with a fault does: it does not crash for the bug."""
    if len(data) >= 2 and int.from_bytes(data[:2], "little") > len(data):
        raise SystemError("returned NULL without setting an exception")
    return trusting(data) is None


BARE_TOY = Target(
    "toy",
    lambda data: None if data == VALID else ValueError("no"),
    lambda: [VALID],
    bare=lambda: nullcontext(bare_trusting),
)


def test_a_fault_of_a_bare_decoder_is_found_and_its_input_kept(tmp_path: Path) -> None:
    report = mutational.fuzz(BARE_TOY, Plan(20, findings=tmp_path / "found", bare=2000))
    assert report.findings == 1, "one place in the code, however many inputs get there"
    (told,) = (tmp_path / "found").glob("*.txt")
    assert "SystemError" in told.read_text()
    with pytest.raises(SystemError):
        bare_trusting(told.with_suffix("").read_bytes())


DEADLY_CODE = 77


def is_deadly(data: bytes) -> bool:
    return len(data) >= 2 and data[1] == 0x7F


def end_with_process(last: Path) -> None:
    """Fuzzes a bare decoder that ends the process for some bytes."""

    def deadly(data: bytes) -> bool:
        if is_deadly(data):
            os._exit(DEADLY_CODE)
        return False

    target = Target("toy", lambda data: None, lambda: [VALID], bare=lambda: nullcontext(deadly))
    mutational.fuzz(target, Plan(20, bare=100_000), LastInput(last))


if __name__ == "__main__":
    end_with_process(Path(sys.argv[1]))
