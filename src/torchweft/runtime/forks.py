"""Processes that a worker forks, and that come back out of the function that forked them.

Only the parent is the worker. A forked process has one thread, the one that forked. If that is a
thread of Weft, for instance because a remote function called ``os.fork``, and the function returns
or raises in the child, the child would go on as that thread: answer the call a second time, take
the parent's events, and wait for ever for locks that other threads of the parent held. So a child
ends as soon as it comes back to a frame of Weft that was there when it was forked. A child that
ends in the function, as those of ``multiprocessing`` do, is not affected.

To look at each return of a function would be costly in the parent. So only the child does it, by a
profile function. A child of ``multiprocessing`` never comes back and does not need that.

The parent collects the exit status of children that have ended this way: a program that did not
expect them to come back does not wait for them. They write their process ids to memory that both
share.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
import traceback
from types import FrameType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OF_PROGRAMS = tuple(_PACKAGE + each + os.sep for each in ("launch", "cli", "compat", "observe"))
"""Packages whose frames run whole programs, which may end in a child as in any process."""
_MULTIPROCESSING = os.sep + os.path.join("multiprocessing", "popen_fork.py")
_PID = struct.Struct("I")
_SIZE_BYTES = mmap.PAGESIZE
_LOOK_S, _LOOKS_FOR_S = 0.05, 5.0
"""How often, and how long after a fork, the parent looks for children that came back; after that
it looks as often as it looks at other things."""


class Children:
    """The children of one worker that came back; made before the first fork, in the parent."""

    def __init__(self) -> None:
        self._came_back = mmap.mmap(-1, _SIZE_BYTES)
        self._forked_s = time.monotonic()
        self._ended: list[int] = []

    def forked(self) -> float:
        """Notes a fork, in the parent; returns when to call ``collect``."""
        self._forked_s = time.monotonic()
        return self._forked_s + _LOOK_S

    def comes_back(self) -> None:
        """Notes, in a child, that it came back and is about to end."""
        place = os.getpid() * _PID.size % _SIZE_BYTES
        _PID.pack_into(self._came_back, place, os.getpid())

    def collect(self, now_s: float) -> float:
        """Collects the exit status of children that have ended; a job of the timers."""
        found = self._came_back[:]
        if found.strip(b"\0"):
            self._ended += [pid for (pid,) in _PID.iter_unpack(found) if pid]
            for place in range(0, _SIZE_BYTES, _PID.size):
                if found[place : place + _PID.size].strip(b"\0"):
                    self._came_back[place : place + _PID.size] = bytes(_PID.size)
        self._ended = [pid for pid in self._ended if not _is_collected(pid)]
        is_soon = self._ended or now_s < self._forked_s + _LOOKS_FOR_S
        return now_s + (_LOOK_S if is_soon else _LOOKS_FOR_S)


def _is_collected(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return True  # The program has done so.


def end_when_back(worker: str, children: Children | None, frame: FrameType | None) -> None:
    """Ends this process, a new child, as soon as it comes back to a frame of Weft.

    Args:
        worker: The name of the worker that is the parent.
        children: Where the child tells the parent that it ends.
        frame: The frame that forked.
    """
    waiting: set[FrameType] = set()
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith(_MULTIPROCESSING):
            return
        if path.startswith(_PACKAGE) and not path.startswith(_OF_PROGRAMS):
            waiting.add(frame)
        frame = frame.f_back
    if not waiting:
        return
    is_back = False

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_back
        # A function returns or raises to such a frame. At its next step, the error is known there.
        if is_back or frame in waiting or (event == "call" and frame.f_back in waiting):
            _end(worker, children)
        is_back = event == "return" and frame.f_back in waiting

    sys.setprofile(look)


def _end(worker: str, children: Children | None) -> None:
    """Ends this process at once: it must not flush buffers, or run handlers, of its parent."""
    try:
        error = sys.exc_info()[1]
        raised = "" if error is None else "".join(traceback.format_exception(error))
        text = (
            f"{raised}weft: process {os.getpid()}, which a function on worker {worker!r} forked, "
            "came back out of that function and ends: only its parent is the worker. End a forked "
            "process in the function, by os._exit(), or use multiprocessing\n"
        )
        os.write(2, text.encode(errors="replace"))
        if children is not None:
            children.comes_back()
    finally:
        os._exit(1)
