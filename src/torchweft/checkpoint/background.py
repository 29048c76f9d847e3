"""Runs work on a thread of its own, and returns a future of the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from torchweft.agent.current import current
from torchweft.rpc.futures import fail

T = TypeVar("T")


def start(work: Callable[[], T], name: str, *, is_awaited: bool) -> torch.futures.Future[T]:
    """Runs a function on a thread of its own; returns a future of its result.

    Args:
        work: The function to run.
        name: The name of the thread, appended to the name of the worker.
        is_awaited: Whether the process waits for the thread when it ends.
    """
    future: torch.futures.Future[T] = torch.futures.Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            fail(future, without_frames(error))
        else:
            future.set_result(result)

    thread = threading.Thread(
        target=run, name=f"weft-{current().info.name}-{name}", daemon=not is_awaited
    )
    thread.start()
    return future


def without_frames(error: BaseException) -> BaseException:
    """Returns an error after removing the tracebacks of the error and its causes.

    The garbage collector cannot see into PyTorch's futures, so a cycle through one would leak.
    """
    link: BaseException | None = error
    while link is not None:
        BaseException.with_traceback(link, None)
        link = link.__cause__ or link.__context__
    return error
