"""The future of a map: a real ``torch.futures.Future`` that can be awaited and cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from weft.agent.reactor import Reactor
from weft.rpc.futures import Future, fail

T = TypeVar("T")


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
        if not self._over.is_set():
            self._give_up = give_up

    def complete(self, result: T) -> None:
        """Completes it with a result."""
        self._give_up = None  # It leads back here, and no collector looks into futures.
        self.set_result(result)
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """Completes it with an error; each who waits is raised a copy of it."""
        self._give_up = None
        fail(self, error)
        self._over.set()

    def wait(self) -> T:
        """Blocks until all parts have ended and their results are reduced; returns the result.

        A function that waits here while it serves a call does not keep others from being served.

        Raises:
            CallTimeout: A part took too long.
            WorkerLost: Workers were lost, and nobody is left to run the parts.
            ReduceError: The reducer failed.
            Exception: Whatever a part raised.
        """
        if not self.done():
            wait_for(self._reactor, self._over)
        return super().wait()

    def cancel(self) -> bool:
        """Gives the map up: it fails with ``CallCancelled``, and calls that run are cancelled.

        Returns:
            Whether there was anything to give up.
        """
        give_up = self._give_up
        return give_up is not None and give_up()

    def __await__(self) -> Generator[Any, None, T]:
        return Future.__await__(self)  # type: ignore[arg-type]


def wait_for(reactor: Reactor, event: threading.Event) -> None:
    """Blocks until something has happened, and lets others use this worker's threads meanwhile."""
    is_counted = reactor.begin_wait()
    try:
        event.wait()
    finally:
        if is_counted:
            reactor.end_wait()
