"""A queue of tasks that takes turns between their senders, so that none starves the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Task = tuple[Callable[..., None], Any, Any]

OWN = -1
"""The sender of this worker's own tasks."""

LAST = -2
"""The sender of tasks that run only when no other sender has a task."""

SWEEP_LIMIT = 256
"""Number of senders from which empty queues are dropped before another queue is added."""


class _SenderQueue:
    """The waiting tasks of one sender, each with its size in bytes."""

    __slots__ = ("size_bytes", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[tuple[Task, int]] = deque()
        self.size_bytes = 0


class FairQueue:
    """Tasks by sender, taken from the senders in turn. Thread-safe.

    Args:
        limit: How many offered tasks of one sender may wait.
        limit_bytes: Limit of their total size.
        kept: Senders whose tasks finalizers append; their queues are never dropped.
    """

    def __init__(
        self, limit: int, limit_bytes: int, kept: frozenset[int] = frozenset({OWN})
    ) -> None:
        self.ready: deque[int] = deque()
        """The senders with waiting tasks, in turn; empty if no task waits."""
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._kept = kept
        # Queues for finalizers exist from the start: a finalizer may run during a sweep.
        self._queues = {sender: _SenderQueue() for sender in kept}
        self._sweep_at = SWEEP_LIMIT
        # Reentrant: a finalizer may run, and append a task, while the lock is held.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return sum([len(queue.tasks) for queue in self._queues.values()])

    def append(self, task: Task, sender: int = OWN, size_bytes: int = 0) -> None:
        """Appends a task of a sender, regardless of the limits."""
        with self._lock:
            waiting = self._queues.get(sender)
            if waiting is None:
                waiting = self._add(sender)
            waiting.tasks.append((task, size_bytes))
            waiting.size_bytes += size_bytes
            if len(waiting.tasks) == 1:
                self.ready.append(sender)

    def _add(self, sender: int) -> _SenderQueue:
        # Each life of a worker is a separate sender, and the empty queues of past lives would
        # accumulate. Dropping a queue as soon as it is empty would slow down every call.
        if len(self._queues) >= self._sweep_at:
            for key in self._queues.keys() - self._kept:
                if not self._queues[key].tasks:
                    del self._queues[key]
            self._sweep_at = max(SWEEP_LIMIT, 2 * len(self._queues))
        added = self._queues[sender] = _SenderQueue()
        return added

    def offer(self, task: Task, sender: int, size_bytes: int) -> bool:
        """Appends a task of a sender; returns False if that would exceed the limits.

        A sender without waiting tasks may add a task of any size.
        """
        with self._lock:
            waiting = self._queues.get(sender) or self._add(sender)
            tasks = waiting.tasks
            size_bytes_after = waiting.size_bytes + size_bytes
            if tasks and (len(tasks) >= self._limit or size_bytes_after > self._limit_bytes):
                return False
            tasks.append((task, size_bytes))
            waiting.size_bytes = size_bytes_after
            if len(tasks) == 1:
                self.ready.append(sender)
        return True

    def popleft(self) -> Task:
        """Takes the first task of the sender whose turn it is.

        Raises:
            IndexError: No task waits.
        """
        with self._lock:
            sender = self.ready.popleft()
            if sender == LAST and self.ready:
                self.ready.append(sender)
                sender = self.ready.popleft()
            waiting = self._queues[sender]
            task, size_bytes = waiting.tasks.popleft()
            waiting.size_bytes -= size_bytes
            if waiting.tasks:
                self.ready.append(sender)
            return task
