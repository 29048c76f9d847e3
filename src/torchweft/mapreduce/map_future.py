"""The future of a map: a real ``torch.futures.Future`` that can be awaited and cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from torchweft.rpc.futures import Future, fail
from torchweft.runtime.reactor import Reactor

T = TypeVar("T")

_LOOK_S = 0.5
"""How often a waiting thread checks whether the worker has shut down."""


class MapFuture(torch.futures.Future[T]):
    """The result of a map that may not be there yet.

    Works with ``then``, ``add_done_callback``, ``torch.futures.collect_all`` and ``wait_all``.

    Args:
        reactor: Runs the tasks of this worker.
    """

    __slots__ = ("_give_up", "_over", "_reactor")

    def __init__(self, reactor: Reactor) -> None:
        torch._C.Future.__init__(self, [])
        self._reactor = reactor
        self._over = threading.Event()
        self._give_up: Callable[[], bool] | None = None

    def can_cancel(self, give_up: Callable[[], bool]) -> None:
        """Has ``cancel`` call ``give_up``."""
        self._give_up = give_up

    def complete(self, result: T) -> None:
        """Completes it with a result."""
        self._give_up = None  # A reference cycle, and the garbage collector cannot see futures.
        self._over.set()  # First: callbacks may take long.
        self.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Completes it with an error; each waiter raises its own copy."""
        self._give_up = None
        self._over.set()
        fail(self, error)

    def wait(self) -> T:
        """Blocks until all parts have ended and their results are reduced; returns the result.

        A wait while serving a call does not keep this worker from serving other calls.

        Raises:
            CallTimeout: A part took too long.
            WorkerLost: Workers were lost, and no worker is left to run the parts.
            ReduceError: The reducer failed.
            Exception: A part raised it.
        """
        if not self.done():
            wait_for(self._reactor, self._over, self.cancel)
        return super().wait()

    def cancel(self) -> bool:
        """Gives the map up: it fails with ``CallCancelled``, and running calls are cancelled.

        Returns:
            False if the map was over already.
        """
        give_up = self._give_up
        return give_up is not None and give_up()

    def __await__(self) -> Generator[Any, None, T]:
        return Future.__await__(self)  # type: ignore[arg-type]


def wait_for(reactor: Reactor, over: threading.Event, give_up: Callable[[], object]) -> None:
    """Blocks until a map is over, and lets other tasks use this worker's threads meanwhile.

    Args:
        reactor: Runs the tasks of this worker. If it closes, the tasks that would set ``over`` may
            never run.
        over: Set at the end of the map.
        give_up: Ends the map if the reactor closes.
    """
    is_counted = reactor.begin_wait()
    try:
        while not over.wait(_LOOK_S):
            if reactor.is_closing:
                give_up()
    finally:
        if is_counted:
            reactor.end_wait()
