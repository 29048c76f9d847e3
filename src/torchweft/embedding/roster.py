"""Ids with places, counts and age marks, of bounded number; the oldest or rarest give way."""

from __future__ import annotations

from typing import Final

import numpy as np

from torchweft.embedding.idmap import IdMap, Ints
from torchweft.embedding.plan import Evict

_SHARE: Final = 64
"""A full roster evicts at least this part of its capacity at once."""


class Roster:
    """Ids that have places, from 0 to ``capacity - 1``; not thread-safe.

    Args:
        capacity: The largest number of ids.
        evict: Which ids give way first.
    """

    def __init__(self, capacity: int, evict: Evict) -> None:
        self.capacity = capacity
        self.ids = np.zeros(capacity, np.int64)
        """The id of each place."""
        self.counts = np.zeros(capacity, np.int64)
        """In how many steps the id of each place has occurred."""
        self.ages = np.zeros(capacity, np.int64)
        """The last step in which the id of each place has occurred."""
        self.added = 0
        """How many ids were added."""
        self.evicted = 0
        """How many ids have given way to others."""
        self._evict = evict
        self._is_held = np.zeros(capacity, np.bool_)
        self._map = IdMap()
        self._freed = np.zeros(0, np.int64)
        self._end = 0  # places from here were never used

    def __len__(self) -> int:
        return len(self._map)

    def find(self, ids: Ints) -> Ints:
        """Returns the place of each id; -1 for those that have none."""
        return self._map.find(ids)

    def held(self) -> Ints:
        """Returns the places of all ids, in the order of ids."""
        places = np.flatnonzero(self._is_held)
        return places[np.argsort(self.ids[places])]

    def touch(self, places: Ints, step: int) -> None:
        """Notes that ids, each once, have occurred in a step."""
        self.counts[places] += 1
        self.ages[places] = step

    def add(self, ids: Ints, counts: Ints, step: int) -> Ints:
        """Gives places to ids, each once, that have none; returns these places.

        Others give way if there is no room, but none that has occurred in this step. So at most
        ``capacity`` ids occur in one.
        """
        lacking = len(self) + len(ids) - self.capacity
        if lacking > 0:
            self._make_room(lacking, step)
        self.added += len(ids)
        return self._set(ids, counts, np.full(len(ids), step))

    def remove(self, places: Ints) -> None:
        """Takes places, each once, from their ids."""
        self._map.remove(self.ids[places])
        self._is_held[places] = False
        self._freed = np.concatenate([places, self._freed])

    def fill(self, ids: Ints, counts: Ints, ages: Ints) -> tuple[Ints, Ints]:
        """Takes over ids, each once, while there are none here; not those that are too many.

        Returns:
            Which of the ids were taken over, rising; and their places.
        """
        chosen = np.arange(len(ids))
        if len(ids) > self.capacity:
            gone = first_to_go(ids, counts, ages, len(ids) - self.capacity, self._evict)
            chosen = np.delete(chosen, gone)
        return chosen, self._set(ids[chosen], counts[chosen], ages[chosen])

    def _set(self, ids: Ints, counts: Ints, ages: Ints) -> Ints:
        new = max(0, len(ids) - len(self._freed))
        places = np.concatenate([self._freed[: len(ids)], np.arange(self._end, self._end + new)])
        self._freed = self._freed[len(ids) :]
        self._end += new
        self.ids[places], self.counts[places], self.ages[places] = ids, counts, ages
        self._is_held[places] = True
        self._map.insert(ids, places)
        return places

    def _make_room(self, lacking: int, step: int) -> None:
        others = np.flatnonzero(self._is_held & (self.ages != step))
        number = min(len(others), max(lacking, self.capacity // _SHARE))
        parts = self.ids[others], self.counts[others], self.ages[others]
        self.remove(others[first_to_go(*parts, number, self._evict)])
        self.evicted += number


def first_to_go(ids: Ints, counts: Ints, ages: Ints, number: int, evict: Evict) -> Ints:
    """Returns the positions of those ids, a positive number of them, that give way first."""
    first, second = (ages, counts) if evict == "age" else (counts, ages)
    limit = np.partition(first, number - 1)[number - 1]
    near = np.flatnonzero(first <= limit)  # only these need be in order
    order = np.lexsort((ids[near], second[near], first[near]))
    return near[order[:number]]
