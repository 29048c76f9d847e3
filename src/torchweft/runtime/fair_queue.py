"""A fair queue of tasks: one queue for each sender, served in turn.

A worker that sends ten thousand calls at once fills its own queue; the one call of another worker
is next but one. The queues are bounded. A task that does not fit is refused, and the caller of
``offer`` tells the sender.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Task = tuple[Callable[..., None], Any, Any]

OWN = -1
"""The sender of tasks that this worker gives itself."""

SWEEP_LIMIT = 256
"""From so many senders on, empty queues are dropped before another one is added."""


class _SenderQueue:
    """The tasks of one sender that wait, each with its size in bytes."""

    __slots__ = ("size_bytes", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[tuple[Task, int]] = deque()
        self.size_bytes = 0


class FairQueue:
    """Tasks by sender, taken from one sender after the other. Thread-safe.

    Args:
        limit: How many offered tasks of one sender may wait.
        limit_bytes: How large they may be together.
        kept: Senders whose tasks finalizers append; their queues are never dropped.
    """

    def __init__(
        self, limit: int, limit_bytes: int, kept: frozenset[int] = frozenset({OWN})
    ) -> None:
        self.ready: deque[int] = deque()
        """The senders of which a task waits, in turn; empty where no task waits."""
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._kept = kept
        # Those of finalizers are there from the start: one may run in the midst of a sweep.
        self._queues = {sender: _SenderQueue() for sender in kept}
        self._sweep_at = SWEEP_LIMIT
        # A finalizer may run, and give this worker something to do, while the lock is held.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return sum([len(queue.tasks) for queue in self._queues.values()])

    def append(self, task: Task, sender: int = OWN, size_bytes: int = 0) -> None:
        """Appends a task of a sender, however many of its wait."""
        with self._lock:
            waiting = self._queues.get(sender)
            if waiting is None:
                waiting = self._add(sender)
            waiting.tasks.append((task, size_bytes))
            waiting.size_bytes += size_bytes
            if len(waiting.tasks) == 1:
                self.ready.append(sender)

    def _add(self, sender: int) -> _SenderQueue:
        # Each life of a worker is a sender of its own, and the empty queues of past lives would
        # pile up. To drop a queue as soon as it is empty would cost every call.
        if len(self._queues) >= self._sweep_at:
            for key in self._queues.keys() - self._kept:
                if not self._queues[key].tasks:
                    del self._queues[key]
            self._sweep_at = max(SWEEP_LIMIT, 2 * len(self._queues))
        added = self._queues[sender] = _SenderQueue()
        return added

    def offer(self, task: Task, sender: int, size_bytes: int) -> bool:
        """Appends a task of a sender; returns False where too many of its wait.

        A sender of which no task waits may add one of any size.
        """
        waiting = self._queues.get(sender)
        if waiting is not None and waiting.tasks:
            if len(waiting.tasks) >= self._limit:
                return False
            if waiting.size_bytes + size_bytes > self._limit_bytes:
                return False
        self.append(task, sender, size_bytes)
        return True

    def popleft(self) -> Task:
        """Takes the first task of the sender whose turn it is.

        Raises:
            IndexError: No task waits.
        """
        with self._lock:
            sender = self.ready.popleft()
            waiting = self._queues[sender]
            task, size_bytes = waiting.tasks.popleft()
            waiting.size_bytes -= size_bytes
            if waiting.tasks:
                self.ready.append(sender)
            return task
