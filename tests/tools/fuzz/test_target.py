from __future__ import annotations

import pytest

from tests.fuzz.target import Target


def target(run: object) -> Target:
    return Target("toy", run, lambda: [b"seed"])  # type: ignore[arg-type]


def test_memory_beyond_the_size_of_the_input_is_a_finding() -> None:
    def greedy(data: bytes) -> None:
        bytearray(4 << 20)

    with pytest.raises(AssertionError, match="4 bytes made toy take"):
        target(greedy).check_memory(b"seed")
    target(lambda data: bytearray(1000) and None).check_memory(b"seed")


def test_refusals_are_handed_on() -> None:
    refusal = ValueError("no")
    assert target(lambda data: refusal).check_memory(b"") is refusal
    assert target(lambda data: None).check(b"seed") is None


def test_some_inputs_are_checked_for_memory() -> None:
    def greedy(data: bytes) -> None:
        bytearray(4 << 20)

    greedy_target, noticed = target(greedy), 0
    for number in range(300):
        try:
            greedy_target.check(number.to_bytes(2, "little"))
        except AssertionError:
            noticed += 1
    assert 0 < noticed < 50
