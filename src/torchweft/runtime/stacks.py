"""The stacks of all threads of this process."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from types import FrameType

from torchweft.runtime.interrupts import current_frames, without_collector


def all_stacks() -> dict[int, list[FrameType]]:
    """Returns the frames of each thread by the thread's id, innermost last.

    Each step outwards makes an object. Before Python 3.12 that may collect garbage, and finalizers
    may let the walked thread go on, so that its frame ends in the middle of the step.
    """
    return {ident: _stack_of(frame) for ident, frame in current_frames().items()}


def _stack_of(frame: FrameType) -> list[FrameType]:
    frames = [frame]
    callers = filter(None, map(attrgetter("f_back"), frames))  # also of those that it adds
    without_collector(partial(frames.extend, callers))
    frames.reverse()
    return frames
