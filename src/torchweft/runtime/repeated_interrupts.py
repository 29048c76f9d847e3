"""Interrupts of the main thread that a finalizer swallows come again.

Ctrl-C raises ``KeyboardInterrupt`` in the code that the main thread runs. If that is a finalizer,
or a callback of a weak reference, the interpreter prints the exception and goes on: the program
does not end. Handles, streams and graphs have finalizers, so programs that use many meet this.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from _thread import get_ident
from typing import TYPE_CHECKING

from torchweft.runtime import interrupts
from torchweft.runtime.timers import Timers

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_S = 0.01
"""After how long an interrupt comes again. At once, the hook or the same finalizer would get it."""


class RepeatedInterrupts:
    """Repeats the interrupts that finalizers of the main thread swallow.

    Args:
        timers: The timers of the worker.
    """

    def __init__(self, timers: Timers) -> None:
        self._due_s = math.inf
        self._timer = timers.add(self._tick)
        self._hook = self._look_at  # One object, to be recognized.

    def begin(self) -> None:
        """Looks at all exceptions that are swallowed from now on."""
        self._former = sys.unraisablehook
        sys.unraisablehook = self._hook

    def end(self) -> None:
        """Stops that, unless the program has another hook by now."""
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._former

    def _look_at(self, swallowed: UnraisableHookArgs) -> None:
        is_of_main = get_ident() == interrupts.main_id
        if is_of_main and issubclass(swallowed.exc_type, KeyboardInterrupt):
            self._due_s = time.monotonic() + _AGAIN_S
            self._timer.wake_by(self._due_s)
        else:
            self._former(swallowed)

    def _tick(self, now_s: float) -> float:
        if now_s >= self._due_s:
            self._due_s = math.inf
            if callable(signal.getsignal(signal.SIGINT)) and interrupts.main_id is not None:
                signal.pthread_kill(interrupts.main_id, signal.SIGINT)
        return self._due_s
