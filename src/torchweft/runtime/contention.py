"""How soon an arriving call gets the interpreter lock of a process that computes in Python.

A thread that computes in Python keeps the lock for the switch interval, 5 ms by default, once
another thread wants it. A call that arrives meanwhile needs the lock two or three times, and would
take 10 ms and more. The interval is one setting for the whole process: it is shortened when a
worker joins and restored when it leaves, unless other code has set it since.
"""

from __future__ import annotations

import sys

from torchweft import knobs


class ShortSwitches:
    """Shortens the switch interval until closed; a ``SWITCH_INTERVAL_S`` of 0 leaves it alone."""

    def __init__(self) -> None:
        self._before_s = sys.getswitchinterval()
        wanted_s = knobs.SWITCH_INTERVAL_S.get()
        if 0.0 < wanted_s < self._before_s:
            sys.setswitchinterval(wanted_s)
        self._set_s = sys.getswitchinterval()

    def close(self) -> None:
        """Restores the interval, unless other code has set it since."""
        if sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._before_s)
