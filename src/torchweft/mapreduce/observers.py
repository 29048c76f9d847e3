"""Tells whoever wants to know what maps do: a progress display, a test, an operator's own log.

Rules of the file:

- Nobody listens most of the time, so telling nobody costs next to nothing.
- A map is never hurt by who watches it: an observer that raises is logged once and removed.
- Events come from any thread, several at once. What an observer does there holds the map up, and
  the map may hold a lock meanwhile: an observer neither runs nor cancels maps, nor waits for any.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, current_thread, main_thread
from typing import Protocol

from torchweft.runtime.exception_log import log_exception


class Observer(Protocol):
    """Is told what the maps of this process do; called from several threads.

    Each map has a number that no other map of the process has. Workers go by their names, parts
    by their places in the order of results.
    """

    def begun(self, map_id: int, name: str, parts: int, workers: Sequence[str]) -> None:
        """A map of so many parts begins; ``name`` is that of its function."""

    def started(self, map_id: int, part: int, worker: str) -> None:
        """A part was sent to a worker."""

    def ended(self, map_id: int, part: int, worker: str, seconds: float) -> None:
        """The result of a part came, so long after the part was sent."""

    def moved(self, map_id: int, part: int, from_worker: str, to_worker: str) -> None:
        """A part that waited for one worker will go to another, which had nothing to do."""

    def lost(self, map_id: int, worker: str, parts: Sequence[int]) -> None:
        """A worker was lost; these parts, also ended ones, run again elsewhere."""

    def done(self, map_id: int, error: BaseException | None) -> None:
        """A map is over: it has all results, or raises ``error``."""


class Observers:
    """All observers of this process, called as if they were one; safe to use from any thread."""

    def __init__(self) -> None:
        # Replaced rather than changed, so that telling needs no lock.
        self._observers: tuple[Observer, ...] = ()
        self._lock = Lock()

    def add(self, observer: Observer) -> None:
        """Tells ``observer`` of all events from now on."""
        with self._lock:
            self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> bool:
        """Tells ``observer`` no more; a call that has begun may still end after this.

        Returns:
            Whether it was there: not so if it had raised, or was removed before.
        """
        with self._lock:
            left = tuple(other for other in self._observers if other is not observer)
            was_there = len(left) < len(self._observers)
            self._observers = left
        return was_there

    @property
    def is_watched(self) -> bool:
        """Whether there is any."""
        return bool(self._observers)

    def begun(self, map_id: int, name: str, parts: int, workers: Sequence[str]) -> None:
        """A map of so many parts begins; ``name`` is that of its function."""
        self._tell("begun", map_id, name, parts, workers)

    def started(self, map_id: int, part: int, worker: str) -> None:
        """A part was sent to a worker."""
        self._tell("started", map_id, part, worker)

    def ended(self, map_id: int, part: int, worker: str, seconds: float) -> None:
        """The result of a part came, so long after the part was sent."""
        self._tell("ended", map_id, part, worker, seconds)

    def moved(self, map_id: int, part: int, from_worker: str, to_worker: str) -> None:
        """A part that waited for one worker will go to another, which had nothing to do."""
        self._tell("moved", map_id, part, from_worker, to_worker)

    def lost(self, map_id: int, worker: str, parts: Sequence[int]) -> None:
        """A worker was lost; these parts, also ended ones, run again elsewhere."""
        self._tell("lost", map_id, worker, parts)

    def done(self, map_id: int, error: BaseException | None) -> None:
        """A map is over: it has all results, or raises ``error``."""
        self._tell("done", map_id, error)

    def _tell(self, event: str, *arguments: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, event)(*arguments)
            except BaseException as error:
                # Two threads may get here with one observer: who removes it says so.
                if self.remove(observer):
                    log_exception("%r raised and is told no more about maps", observer)
                if not isinstance(error, Exception) and current_thread() is main_thread():
                    raise  # Ctrl-C


observers = Observers()
"""The observers of this process, which every map tells what it does."""
