"""The stacks of all threads of this process."""

from __future__ import annotations

import gc
import sys
from collections import deque
from types import FrameType


def all_stacks() -> dict[int, list[FrameType]]:
    """Returns the frames of each thread by the thread's id, innermost last.

    Each step outwards makes an object. Before Python 3.12 that may collect garbage, and finalizers
    may let the walked thread go on, so that its frame ends in the middle of the step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return {ident: _stack_of(frame) for ident, frame in sys._current_frames().items()}
    finally:
        if was_enabled:
            gc.enable()


def _stack_of(frame: FrameType | None) -> list[FrameType]:
    frames: deque[FrameType] = deque()
    while frame is not None:
        frames.appendleft(frame)
        frame = frame.f_back
    return list(frames)
