"""The output while tests run: a line for each, or on a terminal one line that counts."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.contract.conformance.cases import CaseName, Outcome, Result
from tests.contract.conformance.lists import UNKNOWN

WORDS: dict[Outcome, str] = {
    "pass": "pass",
    "fail": "FAIL",
    "skip": "skip",
    "timeout": "TIMEOUT",
    "crash": "CRASH",
}


def line_of(result: Result, category: str) -> str:
    return f"{WORDS[result.outcome]:8}{result.seconds:5.1f} {result.case} [{category}]"


class Display:
    """Shows results as they come.

    Args:
        total: How many runs there will be.
        categories: The category of each test that has one.
        every_line: Whether a test that passed has a line of its own too; always so if the output
            is not a terminal.
    """

    def __init__(self, total: int, categories: Mapping[CaseName, str], every_line: bool) -> None:
        self._total = total
        self._categories = categories
        self._is_live = sys.stdout.isatty()
        self._every_line = every_line or not self._is_live
        self._outcomes: Counter[str] = Counter()
        self._begin = time.monotonic()

    def show(self, result: Result, running: Sequence[CaseName]) -> None:
        self._outcomes[WORDS[result.outcome]] += 1
        if self._every_line or result.outcome not in ("pass", "skip"):
            self._clear()
            category = self._categories.get(result.case, UNKNOWN)
            print(line_of(result, category), flush=True)
        if self._is_live:
            self._clear()
            width = shutil.get_terminal_size().columns - 1
            print(self._counts(running)[:width], end="", flush=True)

    def close(self) -> None:
        """Removes the line that counts."""
        self._clear()

    def _clear(self) -> None:
        if self._is_live:
            print("\r\x1b[K", end="")

    def _counts(self, running: Sequence[CaseName]) -> str:
        done = sum(self._outcomes.values())
        counts = ", ".join(f"{number} {word}" for word, number in self._outcomes.items())
        seconds = time.monotonic() - self._begin
        oldest = f" · {running[0]}" if running else ""
        return f"{done} of {self._total} in {seconds:.0f} s: {counts}{oldest}"
