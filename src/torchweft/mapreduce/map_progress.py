"""Shows how this process's maps proceed: `torchweft.progress` as an observer of maps."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from torchweft.mapreduce.observers import observers
from torchweft.progress import Display, Nouns

if TYPE_CHECKING:
    from typing_extensions import Self


class progress(Display):
    """Shows how this process's maps proceed while a ``with`` block runs.

    On a terminal a few rows are updated several times a second. They show the steps of the
    program's loop with rate, remaining time and figures. They also show the parts of the running
    maps, how many of them each worker runs, and the names of workers that delay a map. A part is
    *behind* if it has run for more than a second, and for three times as long as the median of the
    last parts of that function. A line about the loss of a worker stays. This needs rich:
    ``pip install 'torchweft[progress]'``. Without rich, and if ``out`` is not a terminal, plain
    lines are written at a bounded rate: the progress of the maps, and each loss and each part that
    fell behind. A final line tells how much was done, and by which workers::

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

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        observers.remove(self.work)
        super().__exit__(error_type, error, traceback)
