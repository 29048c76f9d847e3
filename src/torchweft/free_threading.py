"""Differences of a Python whose threads run at the same time, without the interpreter lock.

Only differences that Weft has to do something about are here:

* Until Python 3.14, threads that share an ``itertools.count`` may get the same number.
* A ``deque`` is not copied in one step; the copy fails if another thread changes it meanwhile.
* An object that one thread has made and another one drops last is freed by the former, once that
  runs Python code again (PEP 703, "biased reference counting"). A thread that waits does not. So a
  thread that waits for messages, for as long as there are none, has to wake up now and then.
  Otherwise remote values would stay in memory, as would the buffers of tensors that have arrived.
"""

from __future__ import annotations

import itertools
import sys
from _thread import RLock
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

IS_FREE_THREADED = "t" in getattr(sys, "abiflags", "")  # ``sysconfig`` takes a millisecond.
"""Whether this Python can run without the interpreter lock, even if it runs with it."""

LONGEST_WAIT_S = 0.5 if IS_FREE_THREADED else -1.0
"""The longest wait of a thread that keeps waiting, as a timeout; -1 for no limit."""


class _LockedCount:
    """Does as ``itertools.count``, under a lock."""

    def __init__(self, start: int, step: int) -> None:
        self._numbers = itertools.count(start, step)
        # Reentrant: a signal handler or a finalizer may take a number meanwhile.
        self._lock = RLock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._numbers)


def shared_count(start: int = 0, step: int = 1) -> Iterator[int]:
    """Returns an ``itertools.count`` of which each number is given to one thread only."""
    if IS_FREE_THREADED and sys.version_info < (3, 14):
        return _LockedCount(start, step)
    return itertools.count(start, step)


def copy_of(queue: deque[T]) -> Sequence[T]:
    """Returns a copy of a deque that other threads may change meanwhile.

    Without the interpreter lock, an item that is moved meanwhile may be missing, or occur twice.
    """
    if not IS_FREE_THREADED:
        return queue.copy()
    items: list[T] = []
    try:
        for place in range(len(queue)):
            items.append(queue[place])
    except IndexError:
        pass  # Some have been removed meanwhile.
    return items
