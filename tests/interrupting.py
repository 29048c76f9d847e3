"""Interrupts the main thread at each step at which a signal handler may run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torchweft
from torchweft.autograd import engine
from torchweft.engine.channels import shm
from torchweft.engine.worker.references import Handle

PACKAGE = os.path.dirname(torchweft.__file__)


class Interrupt(BaseException):
    """The exception that a signal handler raises."""


def interrupt() -> None:
    raise Interrupt


def interrupt_at(
    step: int, run: Callable[[], object], handler: Callable[[], object] = interrupt
) -> bool:
    """Runs ``handler`` at one of the steps of ``run``; returns whether that step was reached.

    Steps of a finalizer, or of a weak reference's callback, are left out: Python ignores an
    exception there. The tests of channel.shm try them.
    """
    seen = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal seen
        if event not in ("call", "c_return") or _is_in_finalizer(frame):
            return
        if frame.f_code.co_filename.startswith(PACKAGE):
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


def _is_in_finalizer(frame: Any) -> bool:
    while frame is not None and frame.f_code not in FINALIZERS:
        frame = frame.f_back
    return frame is not None


FINALIZERS = (
    shm._end.__code__,
    Handle.__del__.__code__,
    engine.OpenContext.__del__.__code__,
)
