"""A system that refuses threads for a while, as a container does at its limit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_new_threads(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has every start of a thread in the block fail as Python reports it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with patch.context() as inner:
        inner.setattr(threading.Thread, "start", refuse)
        yield
