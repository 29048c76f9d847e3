"""The queue of tasks: a lane for each worker, served in turn, so that none crowds out the others.

A worker that sends ten thousand calls at once fills its own lane. The one call of another worker
is next but one. Lanes are bounded: what does not fit is refused, and whoever put it there says so
to the sender.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Task = tuple[Callable[..., None], Any, Any]

OWN = -1
"""The lane of what this worker gives itself to do."""

SWEEP_LIMIT = 256
"""From so many lanes on, those in which nothing waits are dropped before another one is added."""


class _Lane:
    """What waits for one worker, each with its size in bytes."""

    __slots__ = ("size_bytes", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[tuple[Task, int]] = deque()
        self.size_bytes = 0


class Lanes:
    """Tasks by lane, taken from one lane after the other. Thread-safe.

    Args:
        limit: How many tasks may wait in one lane, of those that are offered.
        limit_bytes: How large they may be together.
        kept: Lanes in which finalizers put tasks; these are never dropped.
    """

    def __init__(
        self, limit: int, limit_bytes: int, kept: frozenset[int] = frozenset({OWN})
    ) -> None:
        self.turns: deque[int] = deque()
        """The lanes in which something waits, in turn: empty where nothing does."""
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._kept = kept
        # Those of finalizers are there from the start: one may run in the midst of a sweep.
        self._lanes = {lane: _Lane() for lane in kept}
        self._sweep_at = SWEEP_LIMIT
        # A finalizer may run, and give this worker something to do, while the lock is held.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return sum([len(lane.tasks) for lane in self._lanes.values()])

    def append(self, task: Task, lane: int = OWN, size_bytes: int = 0) -> None:
        """Puts a task at the end of a lane, however much waits there."""
        with self._lock:
            waiting = self._lanes.get(lane)
            if waiting is None:
                waiting = self._add(lane)
            waiting.tasks.append((task, size_bytes))
            waiting.size_bytes += size_bytes
            if len(waiting.tasks) == 1:
                self.turns.append(lane)

    def _add(self, lane: int) -> _Lane:
        # Each life of a worker has a lane of its own, and empty lanes of lives that are over would
        # pile up. To drop a lane as soon as it is empty would cost every call.
        if len(self._lanes) >= self._sweep_at:
            for key in self._lanes.keys() - self._kept:
                if not self._lanes[key].tasks:
                    del self._lanes[key]
            self._sweep_at = max(SWEEP_LIMIT, 2 * len(self._lanes))
        added = self._lanes[lane] = _Lane()
        return added

    def offer(self, task: Task, lane: int, size_bytes: int) -> bool:
        """Puts a task at the end of a lane; returns False where that is full.

        A lane in which nothing waits takes a task of any size.
        """
        waiting = self._lanes.get(lane)
        if waiting is not None and waiting.tasks:
            if len(waiting.tasks) >= self._limit:
                return False
            if waiting.size_bytes + size_bytes > self._limit_bytes:
                return False
        self.append(task, lane, size_bytes)
        return True

    def popleft(self) -> Task:
        """Takes the first task of the lane whose turn it is.

        Raises:
            IndexError: Nothing waits.
        """
        with self._lock:
            lane = self.turns.popleft()
            waiting = self._lanes[lane]
            task, size_bytes = waiting.tasks.popleft()
            waiting.size_bytes -= size_bytes
            if waiting.tasks:
                self.turns.append(lane)
            return task
