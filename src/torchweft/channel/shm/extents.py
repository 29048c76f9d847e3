"""Tracks the free ranges of a memory: first fit, neighbours joined."""

from __future__ import annotations

import bisect


class Extents:
    """The free ranges within ``start`` to ``end``, in bytes. Not thread-safe."""

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start]
        self._ends = [end]

    def take(self, size_bytes: int) -> int | None:
        """Takes a range and returns its start; None if no free range is long enough."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size_bytes:
                self._starts[index] += size_bytes
                if self._starts[index] == end:
                    del self._starts[index], self._ends[index]
                return start
        return None

    def give_back(self, start: int, size_bytes: int) -> None:
        """Frees a range that ``take`` returned, or any part of it."""
        end = start + size_bytes
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index and self._ends[index - 1] == start:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def free_bytes(self) -> int:
        """Returns the total of free bytes."""
        return sum(self._ends) - sum(self._starts)
