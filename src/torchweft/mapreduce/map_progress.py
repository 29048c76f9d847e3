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

    On a terminal a few rows change several times a second: the steps of the program's loop with
    their rate, the time that is left and figures, the parts of the maps that run, how many of
    them each worker runs, and by name the workers that delay a map: a part is *behind* if it
    has run for more than a second, and for three times as long as the median of the last parts of
    that function. A line about the loss of a worker stays. This needs rich:
    ``pip install 'torchweft[progress]'``. Without it, and where ``out`` is no terminal, plain lines
    are written at a bounded rate: how far the maps are, and each loss and part that fell behind.
    At the end a line says how much was done, and by which workers::

        with torchweft.mapreduce.progress(total=3000, label="meta-step") as shown:
            for step in range(3000):
                loss = meta_step()
                shown.step(loss=loss.item())

    Text that is printed meanwhile through ``sys.stdout``, ``sys.stderr`` or `logging` appears above
    the rows that change. A thread draws them, also while the program waits for a map; it has ended
    when the block is left.

    Args:
        total: How many steps there will be, for the time that is left; None if that is unknown.
        label: A name for the steps, or for the purpose of the maps.
        out: Where to show it; by default ``sys.stderr``.
        is_terminal: Whether ``out`` is one that rows can change on; None to find out.
        interval_s: Seconds between two changes (0.25 by default), or two lines of a log (10).

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
