"""Turns: a few parts run at a time; the others wait, and run in the order of the caller.

A Python semaphore would give a turn to any thread that asks at the right moment. And two threads
may read two messages, so a part that was sent ahead may arrive before the part that it follows.
Hence it names that part, and gets no turn before that part has had its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Place:
    """A place in the queue.

    Attributes:
        number: The number of the waiting part.
        after: The number of the part that it follows.
        event: Set when the place has become a turn.
    """

    __slots__ = ("after", "event", "number")

    def __init__(self, number: int, after: int) -> None:
        self.number = number
        self.after = after
        self.event = threading.Event()


NOTHING = -1
"""In place of a part's number: there is no such part."""


class Turns:
    """Hands out turns. Thread-safe.

    Args:
        count: How many parts have a turn at a time.
    """

    __slots__ = ("_free", "_lock", "_queue", "_seen")

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._queue: list[Place] = []
        self._seen = {NOTHING}

    def take(self, number: int, after: int = NOTHING) -> Place | None:
        """Takes a turn, and returns None; or returns a place in the queue, for ``wait``."""
        with self._lock:
            place = Place(number, after)
            self._queue.append(place)
            self._hand_out()
            return None if place.event.is_set() else place

    def wait(self, place: Place, look_s: float, is_unwanted: Callable[[], bool]) -> bool:
        """Blocks until a place in the queue has become a turn.

        Args:
            place: The place that ``take`` returned.
            look_s: Seconds between two calls of ``is_unwanted``.
            is_unwanted: Whether the turn is not wanted any more.

        Returns:
            Whether the part has a turn; if not, the place was given up.
        """
        while not place.event.wait(look_s) and not is_unwanted():
            pass
        if not is_unwanted():
            return True
        with self._lock:
            had_turn = place.event.is_set()
            if not had_turn:
                self._queue.remove(place)
        if had_turn:
            self.give_back()
        return False

    def give_back(self) -> None:
        """Ends a turn, and passes it to the first part in the queue that may run."""
        with self._lock:
            self._free += 1
            self._hand_out()

    def _hand_out(self) -> None:
        while self._free:
            place = next((place for place in self._queue if place.after in self._seen), None)
            if place is None:
                return
            self._queue.remove(place)
            self._seen.add(place.number)
            self._free -= 1
            place.event.set()
