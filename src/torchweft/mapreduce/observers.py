"""Reports the events of maps to observers: a progress display, a test, an operator's own log.

Rules of the file:

- Usually there are no observers, so an event without observers costs next to nothing.
- An observer cannot make a map fail: an observer that raises is logged once and removed.
- Events come from any thread, also several at once. An observer blocks the map, which may hold a
  lock meanwhile. So an observer must not run maps, cancel them, or wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, current_thread, main_thread
from typing import Protocol

from torchweft.runtime.exception_log import log_exception


class Observer(Protocol):
    """Receives the events of this process's maps; called from several threads.

    The number of a map is unique in the process. Workers are identified by their names, parts by
    their places in the order of results.
    """

    def begun(self, map_id: int, name: str, parts: int, workers: Sequence[str]) -> None:
        """A map of so many parts begins; ``name`` is the name of its function."""

    def started(self, map_id: int, part: int, worker: str) -> None:
        """A part begins: it was sent, or it was sent ahead and its worker now runs it."""

    def ended(self, map_id: int, part: int, worker: str, seconds: float) -> None:
        """The result of a part arrived, ``seconds`` after the part began."""

    def moved(self, map_id: int, part: int, from_worker: str, to_worker: str) -> None:
        """A part that waited for one worker will go to another, idle worker."""

    def lost(self, map_id: int, worker: str, parts: Sequence[int]) -> None:
        """A worker was lost; these parts, also ended parts, run again on the remaining workers."""

    def done(self, map_id: int, error: BaseException | None) -> None:
        """A map is over: it has all results, or raises ``error``."""


class Observers:
    """All observers of this process, called as if they were a single observer. Thread-safe."""

    def __init__(self) -> None:
        # Replaced rather than changed, so that reporting needs no lock.
        self._observers: tuple[Observer, ...] = ()
        self._lock = Lock()

    def add(self, observer: Observer) -> None:
        """Reports all events to ``observer`` from now on."""
        with self._lock:
            self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> bool:
        """Stops reporting to ``observer``; a call that has begun may still end after this.

        Returns:
            Whether the observer was present: False if it had raised, or was removed before.
        """
        with self._lock:
            left = tuple(other for other in self._observers if other is not observer)
            was_there = len(left) < len(self._observers)
            self._observers = left
        return was_there

    @property
    def is_watched(self) -> bool:
        """Whether there is an observer."""
        return bool(self._observers)

    def begun(self, map_id: int, name: str, parts: int, workers: Sequence[str]) -> None:
        """A map of so many parts begins; ``name`` is the name of its function."""
        self._tell("begun", map_id, name, parts, workers)

    def started(self, map_id: int, part: int, worker: str) -> None:
        """A part begins: it was sent, or it was sent ahead and its worker now runs it."""
        self._tell("started", map_id, part, worker)

    def ended(self, map_id: int, part: int, worker: str, seconds: float) -> None:
        """The result of a part arrived, ``seconds`` after the part began."""
        self._tell("ended", map_id, part, worker, seconds)

    def moved(self, map_id: int, part: int, from_worker: str, to_worker: str) -> None:
        """A part that waited for one worker will go to another, idle worker."""
        self._tell("moved", map_id, part, from_worker, to_worker)

    def lost(self, map_id: int, worker: str, parts: Sequence[int]) -> None:
        """A worker was lost; these parts, also ended parts, run again on the remaining workers."""
        self._tell("lost", map_id, worker, parts)

    def done(self, map_id: int, error: BaseException | None) -> None:
        """A map is over: it has all results, or raises ``error``."""
        self._tell("done", map_id, error)

    def _tell(self, event: str, *arguments: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, event)(*arguments)
            except BaseException as error:
                # Two threads may get here with one observer: the thread that removes it logs it.
                if self.remove(observer):
                    log_exception("%r raised and is told no more about maps", observer)
                if not isinstance(error, Exception) and current_thread() is main_thread():
                    raise  # Ctrl-C


observers = Observers()
"""The observers of this process; every map reports its events to them."""
