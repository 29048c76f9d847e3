"""Lets a test be another user of this machine for a moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Has what this process makes belong to another user; skips the test where that cannot be."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
