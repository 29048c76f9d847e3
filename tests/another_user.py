"""Lets a test act as another user of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Runs the block with another effective user id; skips the test unless the user is root."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
