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
