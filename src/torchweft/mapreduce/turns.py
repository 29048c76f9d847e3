"""Turns: a few parts run at a time, the others wait, and go on in the order of the caller.

A semaphore of Python's would give a turn to whoever asks at the right moment. And two messages
may be read by two threads, so a part that was sent ahead of another one may well come before it:
it says which one that is, and has no turn before that has had one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Place:
    """A place in the queue.

    Attributes:
        number: Of the part that waits.
        after: The number of the part that comes before it.
        event: Set when it has become a turn.
    """

    __slots__ = ("after", "event", "number")

    def __init__(self, number: int, after: int) -> None:
        self.number = number
        self.after = after
        self.event = threading.Event()


NOTHING = -1
"""Where the number of a part is expected: there is none."""


class Turns:
    """Hands out turns. Thread-safe.

    Args:
        count: How many have a turn at a time.
    """

    __slots__ = ("_free", "_lock", "_queue", "_seen")

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._queue: list[Place] = []
        self._seen = {NOTHING}

    def take(self, number: int, after: int = NOTHING) -> Place | None:
        """Takes a turn, or a place in the queue, for ``wait``; None where it is a turn."""
        with self._lock:
            place = Place(number, after)
            self._queue.append(place)
            self._hand_out()
            return None if place.event.is_set() else place

    def wait(self, place: Place, look_s: float, is_unwanted: Callable[[], bool]) -> bool:
        """Blocks until a place in the queue has become a turn.

        Args:
            place: What ``take`` returned.
            look_s: How often to ask ``is_unwanted``, in seconds.
            is_unwanted: Whether nobody wants the turn any more.

        Returns:
            Whether there is a turn; if not, it was given up.
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
        """Ends a turn: the first in the queue has it now."""
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
