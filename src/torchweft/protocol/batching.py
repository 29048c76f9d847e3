"""Decides when waiting calls become a batch: calls and time go in, requests for a turn come out.

See ``docs/protocols/batching.md``. Rules of the file:

- The shell gives a turn that was requested exactly once, sooner or later. It may give more turns:
  a turn closes a batch only if one is due. So a late or doubled turn does no harm.
- At most one turn of each kind is requested at a time, and none while a batch runs: the end of the
  batch requests the next.
- A call is in the queue from ``arrived`` until ``left``, or until ``turn`` returns it.
- After every event but ``left`` the shell reads ``wake_s``; at that time it calls ``woken``.
"""

from __future__ import annotations

import enum
import math
from itertools import islice
from typing import Any


class Request(enum.Enum):
    """What the shell has to do after an event."""

    NOTHING = enum.auto()
    SOON = enum.auto()
    """Give a turn soon: a batch is due."""
    LAST = enum.auto()
    """Give a turn when no message waits to be handled: more calls may be among them."""
    REFUSE = enum.auto()
    """Refuse the call: too many wait."""


NOTHING, SOON, LAST, REFUSE = Request


class Batcher:
    """The queue of one batched function. Not thread-safe.

    Args:
        largest: How many calls a batch has at most.
        smallest: How many calls must wait for a batch to be closed, before ``longest_wait_s``.
        longest_wait_s: How long a call waits for others, in seconds.
        limit: How many calls may wait.

    Attributes:
        wake_s: When to look at the clock; infinity for never. Never moves to an earlier time
            except from infinity.
        is_running: Whether a batch runs.
    """

    __slots__ = (
        "_has_asked_last",
        "_has_asked_soon",
        "_largest",
        "_limit",
        "_longest_wait_s",
        "_smallest",
        "_waiting",
        "is_running",
        "wake_s",
    )

    def __init__(self, largest: int, smallest: int, longest_wait_s: float, limit: int) -> None:
        self._largest = largest
        self._smallest = smallest
        self._longest_wait_s = longest_wait_s
        self._limit = limit
        self._waiting: dict[object, float] = {}
        self._has_asked_soon = self._has_asked_last = False
        self.is_running = False
        self.wake_s = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether a further call would be refused."""
        return len(self._waiting) >= self._limit

    def arrived(self, call: object, now_s: float) -> Request:
        """A call has come, which is not equal to any that waits. Hot path."""
        waiting = self._waiting
        if len(waiting) >= self._limit:
            return REFUSE
        waiting[call] = now_s
        if self.is_running or self._has_asked_soon:
            return NOTHING
        if len(waiting) < self._largest and self._has_asked_last:
            return NOTHING
        if len(waiting) < self._smallest and now_s < self.wake_s < math.inf:
            return NOTHING  # Too few, and none of them has waited for long.
        return self._request(now_s)

    def expect(self, smallest: int, now_s: float) -> Request:
        """From now on, this many calls must wait for a batch to be closed early."""
        self._smallest = smallest
        return NOTHING if self.is_running or self._has_asked_soon else self._request(now_s)

    def left(self, call: object) -> bool:
        """A call has been given up; returns whether it was waiting."""
        return self._waiting.pop(call, None) is not None

    def turn(self, now_s: float) -> list[Any]:
        """A turn: returns the calls of a batch that runs from now on, or nothing."""
        self._has_asked_soon = self._has_asked_last = False
        waiting = self._waiting
        if self.is_running or not waiting:
            return []
        if len(waiting) < self._smallest and not self._is_late(now_s):
            self._wake_for_first()
            return []
        self.is_running = True
        if len(waiting) <= self._largest:
            self._waiting = {}
            return list(waiting)
        calls = list(islice(waiting, self._largest))
        for call in calls:
            del waiting[call]
        return calls

    def ended(self, now_s: float) -> Request:
        """The batch has ended."""
        self.is_running = False
        return self._request(now_s)

    def woken(self, now_s: float) -> Request:
        """The shell has looked at the clock, at ``wake_s`` or later."""
        self.wake_s = math.inf
        if self.is_running or not self._waiting:
            return NOTHING  # The end of the batch, or the next call, sees to it.
        if self._has_asked_soon:
            return NOTHING
        if self._is_late(now_s):
            self._has_asked_soon = True
            return SOON
        self._wake_for_first()
        return NOTHING

    def _request(self, now_s: float) -> Request:
        count = len(self._waiting)
        if not count:
            return NOTHING
        if count >= self._largest or self._is_late(now_s):
            self._has_asked_soon = True
            return SOON
        self._wake_for_first()
        if count >= self._smallest and not self._has_asked_last:
            self._has_asked_last = True
            return LAST
        return NOTHING

    def _is_late(self, now_s: float) -> bool:
        return now_s >= self._due_s()

    def _due_s(self) -> float:
        """Returns when the first call has waited long enough."""
        return next(iter(self._waiting.values())) + self._longest_wait_s

    def _wake_for_first(self) -> None:
        # Calls come in the order of time: an earlier wake-up finds what is due then.
        if self.wake_s == math.inf:
            self.wake_s = self._due_s()
