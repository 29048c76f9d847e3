"""Open calls: the table of calls that wait for an answer, and its entries.

An entry leaves the table exactly once: answered, expired, cancelled, or failed with its worker.
The thread that takes it out completes it; every other thread finds it gone. Single operations rely
on the atomicity of ``dict``, so that a hot path takes no lock. ``copy`` is atomic. Iterating over
``items`` is not: a garbage collection may start in between, run finalizers, and let other threads
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torchweft.free_threading import shared_count
from torchweft.protocol.calls.server import ServedCall
from torchweft.wire.frames import Frame


class Waiting(Protocol):
    """The attributes of an entry that the table needs."""

    worker: int
    deadline_s: float
    number: int


Entry = TypeVar("Entry", bound=Waiting)


class CallTable(Generic[Entry]):
    """Open calls by number. Numbers are never used twice."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.pop: Callable[[int, None], Entry | None] = self._entries.pop
        """Does as ``take``, in one atomic step (a single C function)."""
        self.find: Callable[[int], Entry | None] = self._entries.get
        """Returns an entry, and leaves it in the table."""
        self._numbers = shared_count(1)
        self.total = 0
        """Roughly how many calls were made; changes with each call."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> int:
        """Adds ``entry`` and returns its number."""
        number = entry.number = next(self._numbers)
        self._entries[number] = entry
        self.total = number
        return number

    def take(self, number: int) -> Entry | None:
        """Removes and returns an entry; None if it was taken before or never existed."""
        return self._entries.pop(number, None)

    def all(self) -> list[Entry]:
        """Returns the open entries."""
        return list(self._entries.copy().values())

    def has(self, number: int) -> bool:
        """Whether an entry waits under ``number``."""
        return number in self._entries

    def take_expired(self, now_s: float) -> tuple[list[Entry], float]:
        """Removes the entries whose deadline has passed.

        Returns:
            The expired entries, and the earliest deadline among the others (or infinity).
        """
        expired: list[Entry] = []
        earliest_s = math.inf
        for number, entry in self._entries.copy().items():
            if entry.deadline_s > now_s:
                earliest_s = min(earliest_s, entry.deadline_s)
            elif self.take(number) is not None:
                expired.append(entry)
        return expired, earliest_s

    def take_of_worker(self, worker: int) -> list[Entry]:
        """Removes and returns all entries that wait for ``worker``."""
        return self.take_where(lambda entry: entry.worker == worker)

    def take_all(self) -> list[Entry]:
        """Removes and returns all entries."""
        return self.take_where(lambda entry: True)

    def take_where(self, is_meant: Callable[[Entry], bool]) -> list[Entry]:
        """Removes and returns the entries that satisfy ``is_meant``; scans the whole table."""
        numbers = [number for number, entry in self._entries.copy().items() if is_meant(entry)]
        taken = [self.take(number) for number in numbers]
        return [entry for entry in taken if entry is not None]


Subject = tuple[Any, ...]
"""A function that returns a name for the called function, followed by its own arguments."""
Named = str | bytes | Subject | Callable[..., Any]
"""The called function, or its name."""


class OpenCall:
    """One call: the callee, the time limit, and the outcome once there is one.

    The shell's subclass knows the time and how to wait, and sets the attributes.

    Attributes:
        worker: The callee.
        worker_name: The callee's name.
        function: The called function, or its name.
        timeout_s: The time limit.
        started_s: When the call was made.
        deadline_s: When its time is up.
        parent: The served call that it is nested in, or None.
        number: Its number at the callee, set by ``add`` or ``keep``.
        frame: The answer.
        error: The error that ended it.
        on_done: Completes its future; None if it has no future, or if that was completed.
    """

    __slots__ = (
        "deadline_s",
        "error",
        "frame",
        "function",
        "number",
        "on_done",
        "parent",
        "started_s",
        "timeout_s",
        "worker",
        "worker_name",
    )

    worker: int
    worker_name: str
    function: Named
    timeout_s: float
    started_s: float
    deadline_s: float
    parent: ServedCall | None
    number: int
    frame: Frame | None
    error: BaseException | None
    on_done: Callable[[Any], None] | None
