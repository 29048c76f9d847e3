"""Whether to look again for a moment before a thread goes to sleep.

Waking a thread on another core takes longer than a whole small call: 20-50 us on a small virtual
machine, against a look at the socket of 1 us. A thread that spins finds the answer at once, where
the other side runs on a core of its own. Where it does not, spinning keeps it from running. No
figure of the machine tells the two apart reliably, so this goes by its own success: each failure
doubles the time in which waits go straight to sleep, a success lets the next one spin. The rest
is bounded, so that at worst half a percent of the time is spun away, and what has become
worthwhile is noticed within a few calls.

Between the messages of a training step the other side computes for some hundred microseconds. A
thread that has looked in vain for the usual moment goes on for several times as long, if no
thread on the machine waits for a core meanwhile.
"""

from __future__ import annotations

import os
from time import monotonic

from torchweft import knobs
from torchweft.probe import running_threads

_SHORTEST_REST = 10
_LONGEST_REST = 200
"""Rests, in times of what was spun in vain."""


class Spinning:
    """Decides for one kind of wait on one connection whether it spins, and learns from it."""

    __slots__ = ("_cores", "_rest", "_rests_until_s", "long_spin_s", "spin_s")

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self.spin_s = knobs.SPIN_S.get() if self._cores > 1 else 0.0
        self.long_spin_s = max(knobs.LONG_SPIN_S.get(), self.spin_s)
        self._rest = _SHORTEST_REST
        self._rests_until_s = 0.0

    def is_worthwhile(self) -> bool:
        """Whether the next wait is to spin first."""
        return self.spin_s > 0.0 and monotonic() >= self._rests_until_s

    def begin(self) -> Look:
        """Returns the next look, which begins now."""
        return Look(self)

    def succeeded(self) -> None:
        """Notes that what was waited for came while spinning."""
        self._rest = _SHORTEST_REST

    def may_go_on(self) -> bool:
        """Whether to spin for ``long_spin_s`` where ``spin_s`` was not enough."""
        return self.long_spin_s > self.spin_s and 0 < running_threads() <= self._cores

    def failed(self, spun_s: float) -> None:
        """Notes that the thread, having spun for so long, had to go to sleep after all."""
        self._rests_until_s = monotonic() + self._rest * spun_s
        self._rest = min(2 * self._rest, _LONGEST_REST)


class Look:
    """One time of spinning, for a thread that asks after each look whether to go on."""

    __slots__ = ("_began_s", "_is_usual", "_limit_s", "_spinning")

    def __init__(self, spinning: Spinning) -> None:
        self._spinning = spinning
        self._began_s = monotonic()
        self._limit_s = self._began_s + spinning.spin_s
        self._is_usual = True

    def goes_on(self) -> bool:
        """Whether to look once more; if not, the spinning has failed."""
        now_s = monotonic()
        if now_s < self._limit_s:
            return True
        if not (self._is_usual and self._spinning.may_go_on()):
            self._spinning.failed(now_s - self._began_s)
            return False
        self._is_usual, self._limit_s = False, self._began_s + self._spinning.long_spin_s
        return True
