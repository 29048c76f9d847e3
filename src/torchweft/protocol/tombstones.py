"""Remembers what has ended, so that late messages do not bring it back."""

from __future__ import annotations

from collections import OrderedDict


class Tombstones:
    """A set of numbers that forgets those added longest ago; not thread-safe.

    Args:
        limit: How many are remembered.
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
