"""Simulates a system that refuses new threads, as a container does at its limit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_new_threads(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes every start of a thread in the block fail with Python's own error."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with patch.context() as inner:
        inner.setattr(threading.Thread, "start", refuse)
        yield
