"""``torch.futures.wait_all`` and ``collect_all`` that fail with the first call that fails.

PyTorch's own do so for futures that were completed with an error by C++. From Python a future
can only be completed with a value that raises when it is taken: the error is seen when all have
ended, which may be never, where one call waits for what the program does after the error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

AnyFuture = torch.futures.Future[Any]

_stock_wait_all = torch.futures.wait_all
_stock_collect_all = torch.futures.collect_all


def install() -> None:
    """Puts both in the place of PyTorch's."""
    torch.futures.wait_all = wait_all
    torch.futures.collect_all = collect_all


def uninstall() -> None:
    """Puts PyTorch's back."""
    torch.futures.wait_all = _stock_wait_all
    torch.futures.collect_all = _stock_collect_all


def wait_all(futures: Sequence[AnyFuture]) -> list[Any]:
    """Waits for all futures, or until one has failed.

    Returns:
        The values of all.

    Raises:
        Exception: That of one that has failed.
    """
    collect_all(futures).wait()
    return [future.wait() for future in futures]


def collect_all(futures: Sequence[AnyFuture]) -> torch.futures.Future[list[AnyFuture]]:
    """Returns a future of all futures that is done when they are, or when one has failed."""
    made_here = [future for future in futures if isinstance(future, torch.futures.Future)]
    if not made_here:
        return _stock_collect_all(list(futures))
    collected: torch.futures.Future[list[AnyFuture]] = torch.futures.Future()
    may_end = threading.Lock()  # taken once, by who ends it

    def note(done: AnyFuture) -> None:
        try:
            done.value()
        except Exception as error:
            if may_end.acquire(blocking=False):
                collected.set_exception(error.with_traceback(None))  # type: ignore[arg-type]

    def finish(all_done: AnyFuture) -> None:
        if may_end.acquire(blocking=False):
            try:
                collected.set_result(all_done.value())
            except Exception as error:  # of a future that C++ has completed
                collected.set_exception(error.with_traceback(None))  # type: ignore[arg-type]

    for future in made_here:
        future.add_done_callback(note)
    _stock_collect_all(list(futures)).add_done_callback(finish)
    return collected
