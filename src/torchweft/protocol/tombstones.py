"""Remembers the numbers of ended objects, so that late messages do not revive them."""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """A bounded set of numbers that evicts the oldest; not thread-safe.

    Args:
        limit: How many numbers are remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def add(self, number: int) -> None:
        """Remembers ``number``, as the latest."""
        self._numbers[number] = None
        self._numbers.move_to_end(number)
        if len(self._numbers) > self._limit:
            self._numbers.popitem(last=False)

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)
