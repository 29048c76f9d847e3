"""Sets of numbers, of messages or objects, that take little memory however long a worker lives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class SeenNumbers:
    """The numbers seen of a gapless sequence: all below a watermark, and a few above it.

    Numbers arrive out of order, but every number arrives in the end. So those above the watermark
    overtook another: there are as many as are under way, however long the worker lives.

    Args:
        first: The number that the sequence begins with; smaller ones count as seen.
    """

    __slots__ = ("_above", "_watermark")

    def __init__(self, first: int) -> None:
        self._watermark = first
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number < self._watermark or number in self._above

    def add(self, number: int) -> bool:
        """Notes ``number``; returns whether it is new."""
        if number in self:
            return False
        self._above.add(number)
        while self._watermark in self._above:
            self._above.remove(self._watermark)
            self._watermark += 1
        return True


class Tombstones:
    """The numbers of ended objects, so that late messages do not revive them; not thread-safe.

    A number is an int, or a tuple of them.

    A bounded set that evicts the oldest number.

    Args:
        limit: How many numbers are remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, number: Hashable) -> None:
        """Remembers ``number``, as the latest."""
        self._numbers[number] = None
        self._numbers.move_to_end(number)
        if len(self._numbers) > self._limit:
            self._numbers.popitem(last=False)

    def __contains__(self, number: Hashable) -> bool:
        return number in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)
