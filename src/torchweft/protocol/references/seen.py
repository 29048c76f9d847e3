"""Remembers the numbers seen of a gapless sequence, in little memory."""

from __future__ import annotations


class SeenNumbers:
    """The numbers seen so far: all below a watermark, and a few above it.

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

    def count_above(self) -> int:
        """Returns how many numbers are remembered individually."""
        return len(self._above)
