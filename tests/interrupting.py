"""Interrupts the main thread at each step at which a signal handler may run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torchweft
from torchweft.channel.shm import borrowed

PACKAGE = os.path.dirname(torchweft.__file__)


class Interrupt(BaseException):
    """The exception that a signal handler raises."""


def interrupt() -> None:
    raise Interrupt


def interrupt_at(
    step: int, run: Callable[[], object], handler: Callable[[], object] = interrupt
) -> bool:
    """Runs ``handler`` at one of the steps of ``run``; returns whether that step was reached.

    Steps of a weak reference's callback are left out: Python ignores an exception there. The tests
    of ``channel.shm.borrowed`` try them.
    """
    seen = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal seen
        code = frame.f_code
        if code is borrowed._end.__code__:
            return
        if event in ("call", "c_return") and code.co_filename.startswith(PACKAGE):
            seen += 1
            if seen == step:
                handler()

    sys.setprofile(profile)
    try:
        run()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return seen >= step
