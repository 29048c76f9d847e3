"""Reports the events of maps to observers: a progress display, a test, an operator's own log.

Rules of the file:

- Usually there are no observers, so an event without observers costs next to nothing.
- An observer cannot make a map fail: an observer that raises is logged once and removed.
- Events come from any thread, also several at once. An observer blocks the map, which may hold a
  lock meanwhile. So an observer must not run maps, cancel them, or wait for them.

``progress`` is one observer: the display of ``torchweft.progress``.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, current_thread, main_thread
from typing import TYPE_CHECKING, Protocol

from torchweft.engine.threads.reports import log_exception
from torchweft.progress import Display, Nouns

if TYPE_CHECKING:
    from typing_extensions import Self


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
    """All observers of this process. Thread-safe."""

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

    def tell(self, event: str, *arguments: object) -> None:
        """Reports an event: the name and the arguments of a method of ``Observer``."""
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


# The display of progress


class progress(Display):
    """Shows how this process's maps proceed while a ``with`` block runs.

    On a terminal a few rows are updated several times a second. They show the steps of the
    program's loop with rate, remaining time and figures, the parts of the running maps, and how
    many of them each worker runs. This needs rich: ``pip install 'torchweft[progress]'``. Without
    rich, and if ``out`` is not a terminal, plain lines are written at a bounded rate. In both cases
    a line names each lost worker, and each part that is *behind*: it has run for more than a
    second, and for three times as long as the median of the last parts of that function. A final
    line tells how much was done, and by which workers::

        with torchweft.mapreduce.progress(total=3000, label="meta-step") as shown:
            for step in range(3000):
                loss = meta_step()
                shown.step(loss=loss.item())

    Text that is printed meanwhile through ``sys.stdout``, ``sys.stderr`` or `logging` appears above
    these rows. A thread draws them, also while the program waits for a map; the thread has ended
    when the block is left.

    Args:
        total: How many steps there will be, for the remaining time; None if that is unknown.
        label: A name for the steps, or for the purpose of the maps.
        out: The stream to write to; by default ``sys.stderr``.
        is_terminal: Whether ``out`` is a terminal with rows that can change; None to detect it.
        interval_s: Seconds between two updates (0.25 by default), or two lines of a log (10).

    Raises:
        ConfigurationError: ``total`` is negative, or ``interval_s`` not positive.
    """

    nouns = Nouns(job="map")

    def __enter__(self) -> Self:
        super().__enter__()
        observers.add(self.work)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        observers.remove(self.work)
        super().__exit__(kind, error, traceback)
