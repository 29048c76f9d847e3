"""Waits for all calls that a block of the program has started."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_thread_local_var = threading.local()


def note_future(future: torch.futures.Future[Any]) -> None:
    """Adds a call to those that the enclosing ``_wait_all``, if any, waits for."""
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at the end of the block, for all calls that the block has started."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list
