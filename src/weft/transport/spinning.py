"""Whether to look again for a moment before a thread goes to sleep.

Waking a thread on another core takes longer than a whole small call: 20-50 us on a small virtual
machine, against a look at the socket of 1 us. A thread that spins finds the answer at once, where
the other side runs on a core of its own. Where it does not, spinning keeps it from running. No
figure of the machine tells the two apart reliably, so this goes by its own success: each failure
doubles the number of waits that go straight to sleep, a success allows the next one to spin.
"""

from __future__ import annotations

import os

from weft import knobs

_LONGEST_REST = 4096


class Spinning:
    """Decides for one kind of wait on one connection whether it spins, and learns from it."""

    __slots__ = ("_rest", "_rests_left", "spin_s")

    def __init__(self) -> None:
        self.spin_s = knobs.SPIN_S.get() if (os.cpu_count() or 1) > 1 else 0.0
        self._rest = 1
        self._rests_left = 0

    def is_worthwhile(self) -> bool:
        """Whether the next wait is to spin first."""
        if self._rests_left:
            self._rests_left -= 1
            return False
        return self.spin_s > 0.0

    def succeeded(self) -> None:
        """Notes that what was waited for came while spinning."""
        self._rest = 1

    def failed(self) -> None:
        """Notes that the thread had to go to sleep after all."""
        self._rests_left = self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
