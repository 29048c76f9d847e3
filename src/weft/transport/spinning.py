"""Whether to look again for a moment before a thread goes to sleep.

Waking a thread on another core takes longer than a whole small call: 20-50 us on a small virtual
machine, against a look at the socket of 1 us. A thread that spins finds the answer at once, where
the other side runs on a core of its own. Where it does not, spinning keeps it from running. No
figure of the machine tells the two apart reliably, so this goes by its own success: each failure
doubles the time in which waits go straight to sleep, a success lets the next one spin. The rest
is bounded, so that at worst half a percent of the time is spun away, and what has become
worthwhile is noticed within a few calls.
"""

from __future__ import annotations

import os
from time import monotonic

from weft import knobs

_SHORTEST_REST = 10
_LONGEST_REST = 200
"""Rests, in times of the spin."""


class Spinning:
    """Decides for one kind of wait on one connection whether it spins, and learns from it."""

    __slots__ = ("_rest", "_rests_until_s", "spin_s")

    def __init__(self) -> None:
        self.spin_s = knobs.SPIN_S.get() if (os.cpu_count() or 1) > 1 else 0.0
        self._rest = _SHORTEST_REST
        self._rests_until_s = 0.0

    def is_worthwhile(self) -> bool:
        """Whether the next wait is to spin first."""
        return self.spin_s > 0.0 and monotonic() >= self._rests_until_s

    def succeeded(self) -> None:
        """Notes that what was waited for came while spinning."""
        self._rest = _SHORTEST_REST

    def failed(self) -> None:
        """Notes that the thread had to go to sleep after all."""
        self._rests_until_s = monotonic() + self._rest * self.spin_s
        self._rest = min(2 * self._rest, _LONGEST_REST)
