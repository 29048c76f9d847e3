"""Components of a worker tell observers their numbers: any table of them, when it is asked for.

A component that nobody observes computes nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchweft.free_threading import shared_count
from torchweft.protocol.observing.report import NumberRow, NumberTable
from torchweft.worker.agent import Slot
from torchweft.worker.current import current

Teller = Callable[[], NumberTable]


class Tellers:
    """The components of one worker that tell numbers. Thread-safe."""

    def __init__(self) -> None:
        self._tellers: dict[int, Teller] = {}
        self._numbers = shared_count()

    def add(self, teller: Teller) -> Callable[[], None]:
        """Adds a component; returns a function that removes it."""
        number = next(self._numbers)
        self._tellers[number] = teller

        def remove() -> None:
            self._tellers.pop(number, None)

        return remove

    def told(self) -> Iterator[NumberTable]:
        """Yields what all tell, tables of one title joined."""
        tables: dict[tuple[str, tuple[str, ...]], list[NumberRow]] = {}
        for teller in list(self._tellers.values()):
            try:
                table = teller()
            except Exception as error:  # A report must not fail because of a part of it.
                row = NumberRow((f"{type(error).__name__}: {error}",), {}, {})
                table = NumberTable("numbers that could not be told", ("error",), (row,))
            tables.setdefault((table.title, table.labels), []).extend(table.rows)
        for (title, labels), rows in tables.items():
            yield NumberTable(title, labels, tuple(rows))


TELLERS: Slot[Tellers] = Slot(Tellers)


def tell(teller: Teller) -> Callable[[], None]:
    """Has observers of this worker, such as ``torchweft top``, shown a table of numbers.

    Args:
        teller: Returns the table. It is called for each report, on some thread of the worker. It
            neither blocks nor takes long.

    Returns:
        A function that ends it.
    """
    return current().slots[TELLERS].add(teller)
