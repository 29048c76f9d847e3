"""The last rare events of a worker, for people who look for the cause of a problem."""

from __future__ import annotations

import time
from collections import deque

from torchweft.free_threading import copy_of

KEPT = 200


class Events:
    """The last events of one worker. Thread-safe: one ``append`` for each."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=KEPT)

    def note(self, text: str, *values: object) -> None:
        """Notes an event.

        Args:
            text: What has happened, as a format of ``%``.
            values: Numbers and texts, which are put into the text when somebody asks.
        """
        self._noted.append((time.monotonic(), text, values))

    def all(self) -> list[tuple[float, str]]:
        """Returns the events, the oldest first, each with its time by ``time.monotonic``."""
        return [(at_s, text % values) for at_s, text, values in copy_of(self._noted)]
