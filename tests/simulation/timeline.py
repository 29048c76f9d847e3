"""Virtual time, and workers' clocks that disagree about it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Timeline:
    """The events of a simulated world by time. Nothing here waits: time jumps to the next event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Calls ``what`` after ``delay_s`` seconds."""
        self._count += 1  # breaks ties, for functions have no order
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, what, arguments))

    def step(self) -> bool:
        """Runs the next event; returns whether there was one."""
        if not self._queue:
            return False
        self.now_s, _, what, arguments = heapq.heappop(self._queue)
        what(*arguments)
        return True

    def run_for(self, span_s: float) -> None:
        """Runs the events of the next ``span_s`` seconds."""
        end_s = self.now_s + span_s
        while self._queue and self._queue[0][0] <= end_s:
            self.step()
        self.now_s = end_s

    def run_until(self, is_reached: Callable[[], bool], limit_s: float, what: str) -> None:
        """Runs events until ``is_reached``; fails if that takes longer than ``limit_s``."""
        end_s = self.now_s + limit_s
        while not is_reached():
            is_going_on = self.now_s <= end_s and self.step()
            assert is_going_on, f"{what}: not within {limit_s} s"


class Clock:
    """A worker's own clock, with its own offset and rate.

    A clock belongs to one life of a worker: after ``stop``, no timer fires any more. While the
    worker is *frozen* (stopped by a signal, or swapped out), timers wait.
    """

    def __init__(self, timeline: Timeline, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self._timeline = timeline
        self._offset_s = offset_s
        self.rate = rate
        self._is_stopped = False
        self._frozen_until_s = 0.0

    @classmethod
    def draw(cls, chance: random.Random, timeline: Timeline) -> Clock:
        """Draws a clock that may be days off and runs up to a tenth too fast or too slow."""
        offset_s = chance.choice((0.0, -1e5, 1e5)) * chance.random()
        return cls(timeline, offset_s, chance.choice((1.0, 0.9, 1.1, 1 + 1e-5)))

    @property
    def now_s(self) -> float:
        """The time that this clock shows."""
        return self._offset_s + self._timeline.now_s * self.rate

    def later(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        """Calls ``what`` when this clock has advanced by ``delay_s``."""
        self._timeline.later(delay_s / self.rate, self._remind, what, arguments)

    def stop(self) -> None:
        """Ends this life."""
        self._is_stopped = True

    def freeze(self, span_s: float) -> None:
        """Freezes the worker for ``span_s`` of true time; the clock itself keeps running."""
        self._frozen_until_s = max(self._frozen_until_s, self._timeline.now_s + span_s)

    @property
    def frozen_s(self) -> float:
        """How long the worker stays frozen, in true time."""
        return max(0.0, self._frozen_until_s - self._timeline.now_s)

    def _remind(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._is_stopped:
            return
        if self.frozen_s:
            self._timeline.later(self.frozen_s, self._remind, what, arguments)
            return
        what(*arguments)
