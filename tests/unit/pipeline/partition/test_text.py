"""Tests texts for people."""

from __future__ import annotations

import pytest

from torchweft.pipeline.partition.text import aligned, bytes_text, layers_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (1e-12, "0.00100 ns"),
        (3.14159e-9, "3.14 ns"),
        (9.994e-6, "9.99 µs"),
        (0.0123, "12.3 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (1, "1.00 s"),
        (9.996, "10.0 s"),
        (123.4, "123 s"),
        (45678.9, "45679 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 2**20 - 1, "10.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    table = aligned(["n", "name", "x"], [["1", "a", "12"], ["10", "long", "3"]], left=["name"])
    assert table.splitlines() == [" n  name   x", " 1  a     12", "10  long   3"]


def test_layers() -> None:
    assert layers_text(range(2, 3), ["conv"]) == "2 conv"
    assert layers_text(range(2, 5), ["conv", "relu", "pool"]) == "2-4 conv … pool"
    assert layers_text(range(2, 5), []) == "2-4"
