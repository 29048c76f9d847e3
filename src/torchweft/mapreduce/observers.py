"""Reports the events of this process's maps, and shows their progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchweft import extending
from torchweft.progress import Display, Nouns

if TYPE_CHECKING:
    from typing_extensions import Self

watching: list[Any] = []
"""What is told of the events of maps, by methods of these names.

``map_id`` is unique in the process. Workers go by their names, parts by their places in the order
of results. Events come from several threads, and the map waits: it may hold a lock.

- ``begun(map_id, name, parts, workers)``: a map of so many parts of a function begins.
- ``started(map_id, part, worker)``: a worker runs a part now.
- ``ended(map_id, part, worker, seconds)``: its result is here, so long after it started.
- ``moved(map_id, part, from_worker, to_worker)``: a part that waited goes to an idle worker.
- ``lost(map_id, worker, parts)``: a worker was lost; these parts, also ended ones, run again.
- ``done(map_id, error)``: a map is over: it has all results, or raises ``error``.
"""


def tell(event: str, *arguments: object) -> None:
    """Reports an event; an error of an observer is logged, and does not concern the map."""
    for observer in watching.copy():
        try:
            getattr(observer, event)(*arguments)
        except Exception:
            extending.log_exception("%r raised when it was told about a map", observer)


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
        watching.append(self.work)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        watching.remove(self.work)
        super().__exit__(kind, error, traceback)
