from __future__ import annotations

from pathlib import Path

from tests.fuzz import mutational
from tests.fuzz.campaign import Plan, Report
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


def test_time_ends_a_run_too() -> None:
    assert mutational.fuzz(TOY, Plan(1 << 40, seconds=0.0)).frames < 10_000


def test_what_is_new_is_kept_and_used_again(tmp_path: Path) -> None:
    corpus = tmp_path / "toy"
    mutational.fuzz(TOY, Plan(500, corpus=corpus))
    kept = {path.read_bytes() for path in corpus.iterdir()}
    assert kept
    tried: set[bytes] = set()
    noting = Target("toy", lambda data: tried.add(data), lambda: [VALID])
    mutational.fuzz(noting, Plan(len(kept) + 1, corpus=corpus))
    assert tried >= kept


def test_the_input_that_ends_a_process_is_known(tmp_path: Path) -> None:
    last_input = LastInput(tmp_path / "last")
    mutational.fuzz(TOY, Plan(20), last_input)
    last_input.note(b"deadly")
    last_input.close()
    assert read_last_input(tmp_path / "last") == b"deadly"


def test_a_report_survives(tmp_path: Path) -> None:
    report = Report("toy", "mutational", 10, 5, 0.5, 3, 0)
    report.write(tmp_path / "report")
    assert Report.read(tmp_path / "report") == report
    assert "20/s" in report.line()
