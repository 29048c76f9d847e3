"""Runs delayed actions on a thread of its own."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable

from torchweft.errors import NotInitialized, WorkerLost


class Late:
    """Runs actions when they are due; actions due at the same time run in the order of ``add``.

    Args:
        name: Name of the thread, which starts with the first action.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, delay_s: float, action: Callable[[], None]) -> None:
        """Runs ``action`` after ``delay_s``; never, if that is after ``close``."""
        with self._changed:
            if self._is_closed:
                return
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), action))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Drops waiting actions, and waits for a running one."""
        with self._changed:
            self._is_closed = True
            self._due.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            # The agent tells callers that wait for a lost worker.
            with contextlib.suppress(NotInitialized, WorkerLost):
                action()

    def _next(self) -> Callable[[], None] | None:
        """Waits for the next action; returns None after ``close``."""
        with self._changed:
            while not self._is_closed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
        return None
