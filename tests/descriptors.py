"""Finds writes to closed descriptors whose numbers other files use by now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def nothing_is_written() -> Iterator[None]:
    """Occupies free descriptor numbers with pipes; fails if anything is written to one of them."""
    others = [os.pipe2(os.O_NONBLOCK) for _ in range(20)]
    try:
        yield
        for reading, _ in others:
            with pytest.raises(BlockingIOError):
                os.read(reading, 8)
    finally:
        for reading, writing in others:
            os.close(reading)
            os.close(writing)
