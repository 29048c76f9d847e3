"""Waits for several futures: PyTorch's functions, which Weft replaces, and ``rpc._wait_all``.

``torch.futures.wait_all`` and ``collect_all`` fail with the first failed call. PyTorch's own
functions do so for futures that C++ completed with an error. Python can only complete a future with
a value that raises when it is read. Then the error is seen when all calls have ended. That may be
never, if one call waits for the program's reaction to the error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

AnyFuture = torch.futures.Future[Any]

_stock_wait_all = torch.futures.wait_all
_stock_collect_all = torch.futures.collect_all


def install() -> None:
    """Replaces PyTorch's functions by these."""
    torch.futures.wait_all = wait_all
    torch.futures.collect_all = collect_all


def uninstall() -> None:
    """Restores PyTorch's functions."""
    torch.futures.wait_all = _stock_wait_all
    torch.futures.collect_all = _stock_collect_all


def wait_all(futures: Iterable[AnyFuture]) -> list[Any]:
    """Waits for all futures, or until one has failed.

    Returns:
        The values of all.

    Raises:
        Exception: The error of a failed future.
    """
    futures = list(futures)
    collect_all(futures).wait()
    return [future.wait() for future in futures]


def collect_all(futures: Iterable[AnyFuture]) -> torch.futures.Future[list[AnyFuture]]:
    """Returns a future of all futures, done when all are done or one has failed."""
    futures = list(futures)
    made_here = [future for future in futures if isinstance(future, torch.futures.Future)]
    if not made_here:
        return _stock_collect_all(futures)
    collected: torch.futures.Future[list[AnyFuture]] = torch.futures.Future()
    may_end = threading.Lock()  # acquired once, by the callback that completes `collected`

    def note(done: AnyFuture) -> None:
        try:
            done.value()
        except Exception as error:
            if may_end.acquire(blocking=False):
                collected.set_exception(error.with_traceback(None))  # type: ignore[arg-type]

    def finish(all_done: AnyFuture) -> None:
        if may_end.acquire(blocking=False):
            try:
                all_done.value()
                # Not the objects that C++ has made: they do not order work on GPUs.
                collected.set_result(futures)
            except Exception as error:  # C++ has completed a future with it
                collected.set_exception(error.with_traceback(None))  # type: ignore[arg-type]

    for future in made_here:
        future.add_done_callback(note)
    _stock_collect_all(futures).add_done_callback(finish)
    return collected


# The calls that a block of the program has started

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
