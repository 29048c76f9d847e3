"""Folds equal lines of many workers into one, and shows the workers' warnings once.

A message that concerns the group comes from each of its workers, at about the same time. Lines are
held for a moment, so that equal ones of other workers can join them. The rules of this file:

- The lines of one worker never change their order: a line only joins one that is held behind the
  worker's former line.
- Lines leave in the order in which the first of each came, and each after ``HOLD_S`` at most.
- Few workers are shown one by one: only the lines of ``MANY`` workers are folded.
- Python shows a warning once in each process. One that another worker has shown is left out, with
  the line of the program below it, unless it can join the other one.

Nothing here knows a clock: callers pass the time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

HOLD_S = 0.2
"""Seconds for which a line is held."""
MANY = 3
"""Least number of workers whose equal lines are folded."""
_WARNINGS_LIMIT = 1000
"""Warnings that are remembered; of later ones, each worker shows its own."""
_WARNING = re.compile(rb"\S.*:\d+: \w*Warning: ")


class Named(Protocol):
    """What tells workers apart."""

    @property
    def name(self) -> str:
        """The name of the worker."""


L = TypeVar("L", bound=Named)


@dataclass(eq=False)
class Held(Generic[L]):
    """A line that is held.

    Attributes:
        line: The line.
        labels: The workers that have written it, in order.
        number: Its place in the order of lines.
        until_s: When it leaves.
    """

    line: bytes
    labels: list[L]
    number: int
    until_s: float


class Folding(Generic[L]):
    """The lines of standard error that are held; not thread-safe."""

    def __init__(self) -> None:
        self._held: deque[Held[L]] = deque()
        self._by_line: dict[bytes, Held[L]] = {}
        self._last: dict[str, int] = {}
        """The number of the last line of each worker."""
        self._count = 0
        self._warnings: dict[bytes, str] = {}
        self._after_left_out: set[str] = set()
        """Workers whose last line was a warning that was left out."""

    def add(self, label: L, line: bytes, now_s: float) -> None:
        """Takes the next line of a worker."""
        is_below = label.name in self._after_left_out and line.startswith(b"  ")
        self._after_left_out.discard(label.name)
        is_shown = self._is_shown_by_another(label, line)
        held = self._by_line.get(line)
        if held is not None and held.number > self._last.get(label.name, -1):
            held.labels.append(label)
            self._last[label.name] = held.number
        elif is_shown:
            self._after_left_out.add(label.name)
        elif not is_below:
            held = Held(line, [label], self._count, now_s + HOLD_S)
            self._last[label.name] = self._count
            self._count += 1
            self._held.append(held)
            self._by_line[line] = held

    def _is_shown_by_another(self, label: L, line: bytes) -> bool:
        """Whether a line is of a warning that another worker has shown."""
        if _WARNING.match(line) is None:
            return False
        if line not in self._warnings and len(self._warnings) < _WARNINGS_LIMIT:
            self._warnings[line] = label.name
        return self._warnings.get(line, label.name) != label.name

    def due_s(self) -> float | None:
        """Returns when the next line leaves; None if none is held."""
        return self._held[0].until_s if self._held else None

    def take(self, now_s: float) -> Iterator[Held[L]]:
        """Yields the lines whose time has come; all of them if ``now_s`` is infinite."""
        while self._held and self._held[0].until_s <= now_s:
            held = self._held.popleft()
            if self._by_line.get(held.line) is held:
                del self._by_line[held.line]
            yield held
