"""A map from int64 ids to places, which finds, inserts and removes many ids at once.

Open addressing with linear probing; all ids of a call make one probe at a time, in numpy. An id
that is removed leaves a mark, so that probes go on behind it, until the map is built anew.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchweft.embedding.initial import mixed

Ints = NDArray[np.int64]
_EMPTY: Final = -1
_REMOVED: Final = -2
_SMALLEST: Final = 16


class IdMap:
    """A map from ids, any int64, to places, at least 0; not thread-safe."""

    def __init__(self) -> None:
        self._build(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    def find(self, ids: Ints) -> Ints:
        """Returns the place of each id; -1 for those that are not in the map."""
        positions = self._positions(ids)
        return np.where(positions < 0, -1, self._places[positions])

    def insert(self, ids: Ints, places: Ints) -> None:
        """Inserts ids, each once, which are not in the map, with different places."""
        # At most half of the positions are in use, so that probes are short.
        if 2 * (self._used + len(ids)) > len(self._ids):
            self._grow(len(ids))
        self._put(ids, places)
        self._count += len(ids)
        self._used += len(ids)

    def remove(self, ids: Ints) -> None:
        """Removes ids, each once, which are in the map."""
        self._places[self._positions(ids)] = _REMOVED
        self._count -= len(ids)

    def _build(self, size: int) -> None:
        self._ids = np.zeros(size, np.int64)
        self._places = np.full(size, _EMPTY, np.int64)
        self._count = self._used = 0

    def _grow(self, more: int) -> None:
        """Builds the map anew, with room for more ids than it is asked for."""
        held = self._places >= 0
        ids, places = self._ids[held], self._places[held]
        needed = 3 * (len(ids) + more)
        self._build(max(_SMALLEST, 1 << (needed - 1).bit_length()))
        self._put(ids, places)
        self._count = self._used = len(ids)

    def _homes(self, ids: Ints) -> Ints:
        """Returns the first position of each id."""
        return mixed(torch.from_numpy(ids)).numpy() & (len(self._ids) - 1)

    def _positions(self, ids: Ints) -> Ints:
        found = np.full(len(ids), -1, np.int64)
        numbers, at = np.arange(len(ids)), self._homes(ids)
        while len(numbers):
            places = self._places[at]
            is_found = (places >= 0) & (self._ids[at] == ids[numbers])
            found[numbers[is_found]] = at[is_found]
            goes_on = ~is_found & (places != _EMPTY)
            numbers, at = numbers[goes_on], self._next(at[goes_on])
        return found

    def _put(self, ids: Ints, places: Ints) -> None:
        at = self._homes(ids)
        while len(ids):
            is_free = self._places[at] < 0
            # Of several ids at a free position, numpy keeps the place of the last.
            self._places[at[is_free]] = places[is_free]
            has_won = self._places[at] == places
            self._ids[at[has_won]] = ids[has_won]
            goes_on = ~has_won
            ids, places, at = ids[goes_on], places[goes_on], self._next(at[goes_on])

    def _next(self, positions: Ints) -> Ints:
        return (positions + 1) & (len(self._ids) - 1)
