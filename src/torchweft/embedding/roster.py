"""Ids with places, counts and age marks, of bounded number; the oldest or rarest give way.

Ids also *expire*, while there is room. That follows from their marks and the number of steps alone:
an expired id is gone, whether its place has been taken from it or not. Each step looks at a few
places for that, and all of them when there is no room. So what is found never depends on places.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from torchweft.embedding.idmap import IdMap, Ints
from torchweft.embedding.plan import Evict

_SHARE: Final = 64
"""A full roster evicts at least this part of its capacity at once."""
_SWEPT: Final = 1024
"""A step looks at so many places, or at this part of them if that is more, for expired ids."""


class Roster:
    """Ids that have places, from 0 to ``capacity - 1``; not thread-safe.

    Args:
        capacity: The largest number of ids.
        evict: Which ids give way first.
        ttl: An id expires when it has not occurred in so many steps; None for never.
        min_frequency: An id expires when it has occurred in a smaller share of the steps since it
            first did.
    """

    def __init__(
        self, capacity: int, evict: Evict, ttl: int | None = None, min_frequency: float = 0.0
    ) -> None:
        self.capacity = capacity
        self._ttl = ttl
        self._min_frequency = min_frequency
        self._swept = 0
        self.ids = np.zeros(capacity, np.int64)
        """The id of each place."""
        self.counts = np.zeros(capacity, np.int64)
        """In how many steps the id of each place has occurred."""
        self.ages = np.zeros(capacity, np.int64)
        """The last step in which the id of each place has occurred."""
        self.firsts = np.zeros(capacity, np.int64)
        """The first step in which the id of each place has occurred."""
        self.added = 0
        """How many ids were added."""
        self.evicted = 0
        """How many ids have given way to others, or have expired and been removed."""
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

    def live(self, ids: Ints, steps: int) -> Ints:
        """Returns the place of each id; -1 for those that have none, or have expired.

        Args:
            ids: The ids.
            steps: How many steps there have been.
        """
        places = self.find(ids)
        if self._expires:
            held = np.flatnonzero(places >= 0)
            places[held[self._is_expired(places[held], steps)]] = -1
        return places

    def held(self, steps: int) -> Ints:
        """Returns the places of all ids that have not expired, in the order of ids."""
        places = np.flatnonzero(self._is_held)
        if self._expires:
            places = places[~self._is_expired(places, steps)]
        return places[np.argsort(self.ids[places])]

    @property
    def _expires(self) -> bool:
        return self._ttl is not None or self._min_frequency > 0

    def _is_expired(self, places: Ints, steps: int) -> NDArray[np.bool_]:
        found = self.counts[places] < self._min_frequency * (steps + 1 - self.firsts[places])
        if self._ttl is not None:
            found |= self.ages[places] <= steps - self._ttl
        return found

    def sweep(self, steps: int, ids: Ints) -> None:
        """Takes the places from expired ids: from given ones, and from some others.

        The work is bounded. ``steps`` is how many steps there have been.
        """
        if not self._expires:
            return
        end = self._swept + max(_SWEPT, -(-self.capacity // _SWEPT))
        places = np.arange(self._swept, min(end, self._end))
        self._swept = 0 if end >= self._end else end
        given = self.find(ids)
        self._expire(np.union1d(places[self._is_held[places]], given[given >= 0]), steps)

    def _expire(self, places: Ints, steps: int) -> None:
        gone = places[self._is_expired(places, steps)]
        if len(gone):
            self.remove(gone)
            self.evicted += len(gone)

    def touch(self, places: Ints, step: int) -> None:
        """Notes that ids, each once, have occurred in a step."""
        self.counts[places] += 1
        self.ages[places] = step

    def add(self, ids: Ints, counts: Ints, firsts: Ints, step: int) -> Ints:
        """Gives places to ids, each once, that have none; returns these places.

        Others give way if there is no room, but none that has occurred in this step. So at most
        ``capacity`` ids occur in one.
        """
        if len(self) + len(ids) > self.capacity:
            self._make_room(len(ids), step)
        self.added += len(ids)
        return self._set(ids, counts, np.full(len(ids), step), firsts)

    def remove(self, places: Ints) -> None:
        """Takes places, each once, from their ids."""
        self._map.remove(self.ids[places])
        self._is_held[places] = False
        self._freed = np.concatenate([places, self._freed])

    def fill(self, ids: Ints, counts: Ints, ages: Ints, firsts: Ints) -> tuple[Ints, Ints]:
        """Takes over ids, each once, while there are none here; not those that are too many.

        Returns:
            Which of the ids were taken over, rising; and their places.
        """
        chosen = np.arange(len(ids))
        if len(ids) > self.capacity:
            gone = first_to_go(ids, counts, ages, len(ids) - self.capacity, self._evict)
            chosen = np.delete(chosen, gone)
        return chosen, self._set(ids[chosen], counts[chosen], ages[chosen], firsts[chosen])

    def _set(self, ids: Ints, counts: Ints, ages: Ints, firsts: Ints) -> Ints:
        new = max(0, len(ids) - len(self._freed))
        places = np.concatenate([self._freed[: len(ids)], np.arange(self._end, self._end + new)])
        self._freed = self._freed[len(ids) :]
        self._end += new
        self.ids[places], self.counts[places] = ids, counts
        self.ages[places], self.firsts[places] = ages, firsts
        self._is_held[places] = True
        self._map.insert(ids, places)
        return places

    def _make_room(self, wanted: int, step: int) -> None:
        if self._expires:
            self._expire(np.flatnonzero(self._is_held & (self.ages != step)), step - 1)
        lacking = len(self) + wanted - self.capacity
        if lacking <= 0:
            return
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
