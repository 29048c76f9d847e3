"""The stacks of this process's threads, without the frames of Weft that lead to the program's."""

from __future__ import annotations

import linecache
import os
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from torchweft.runtime.reactor import Reactor
from torchweft.runtime.stacks import all_stacks

_MOST_FRAMES = 100
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OWN = (_PACKAGE, threading.__file__, "<string>")
"""Files whose frames lead to the program's frames, in a thread of Weft."""
_IDLE = {vars(Reactor)["_serve"].__code__}


class ThreadFrames(NamedTuple):
    """The stack of one thread.

    Attributes:
        ident: The thread's number.
        name: Its name.
        is_main: Whether it is the main thread.
        stack: All its frames, innermost last.
        frames: The frames from the first one that is not Weft's; empty for an idle thread of Weft.
    """

    ident: int
    name: str
    is_main: bool
    stack: list[FrameType]
    frames: list[FrameType]


def thread_frames() -> list[ThreadFrames]:
    """Returns the stack of each thread of Python but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, stack in all_stacks().items():
        if ident != threading.get_ident():
            frames = [] if stack[-1].f_code in _IDLE else inwards(stack)
            name = names.get(ident, f"thread {ident}")
            found.append(ThreadFrames(ident, name, ident == main, stack, frames))
    return found


def inwards(stack: Sequence[FrameType]) -> list[FrameType]:
    """Returns the frames of a stack from the first one that is not Weft's."""
    start = 0
    while start < len(stack) - 1 and stack[start].f_code.co_filename.startswith(_OWN):
        start += 1
    return list(stack[start:])


def is_own(frame: FrameType) -> bool:
    """Whether a frame is of Weft, not of the program."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def lines(frames: Sequence[FrameType], has_source: bool) -> tuple[str, ...]:
    """Returns the last frames as in a traceback, with the lines of their files if wanted."""
    told = []
    for frame in frames[-_MOST_FRAMES:]:
        path, number = frame.f_code.co_filename, frame.f_lineno
        text = f'  File "{path}", line {number}, in {frame.f_code.co_name}'
        source = source_of(frame) if has_source else ""
        told.append(f"{text}\n    {source}" if source else text)
    return tuple(told)


def source_of(frame: FrameType) -> str:
    """Returns the line of a file that a frame is at; empty if there is no such file."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
