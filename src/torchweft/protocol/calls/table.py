"""Open calls: the table of those that wait for an answer, and its entries.

An entry leaves the table exactly once: answered, expired, cancelled, or failed with its worker.
The thread that takes it out completes it; every other thread finds it gone. Single operations rely
on the atomicity of ``dict``, so that a hot path takes no lock. ``copy`` is one of them; going
through ``items`` is not, for a collection may begin in between and run finalizers, and other
threads with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from torchweft.protocol.calls.server import ServedCall
from torchweft.wire.frames import Frame


class Waiting(Protocol):
    """What the table needs to know of an entry."""

    worker: int
    deadline_s: float
    number: int


Entry = TypeVar("Entry", bound=Waiting)


class CallTable(Generic[Entry]):
    """Open calls by number. Numbers are never used twice."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.pop: Callable[[int, None], Entry | None] = self._entries.pop
        """As ``take``, in a single step of a function in C."""
        self._numbers = itertools.count(1)
        self.total = 0
        """How many calls there have been: it changes with each, and roughly counts them."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> int:
        """Takes up ``entry`` and returns its number."""
        number = entry.number = next(self._numbers)
        self._entries[number] = entry
        self.total = number
        return number

    def take(self, number: int) -> Entry | None:
        """Removes and returns an entry; None where it was taken before, or never was."""
        return self._entries.pop(number, None)

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
        """Removes and returns the entries that are meant; looks at all."""
        numbers = [number for number, entry in self._entries.copy().items() if is_meant(entry)]
        taken = [self.take(number) for number in numbers]
        return [entry for entry in taken if entry is not None]


Subject = tuple[Any, ...]
"""A function that returns the name of what is called, and its arguments."""
Named = str | bytes | Subject | Callable[..., Any]
"""What is called, or its name."""


class OpenCall:
    """One call: the callee, the time limit, and the outcome once there is one.

    The shell derives a class from it that knows the time and how to wait, and sets the attributes.

    Attributes:
        worker: The callee.
        worker_name: Its name.
        function: What is called, or its name.
        timeout_s: The time limit.
        started_s: When the call was made.
        deadline_s: When its time is up.
        parent: The call of another worker in whose course it is made, if it is.
        number: What the callee knows it by, once it is on its way.
        frame: The answer.
        error: The error that ended it.
    """

    __slots__ = (
        "deadline_s",
        "error",
        "frame",
        "function",
        "number",
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

    @property
    def has_outcome(self) -> bool:
        """Whether an answer or an error is here, though perhaps not yet looked at."""
        return self.frame is not None or self.error is not None
