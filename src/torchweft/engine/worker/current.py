"""The one current agent of this process, and the processes that the worker forks.

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
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torchweft.engine.threads.timers import Timer
from torchweft.engine.worker.agent import Agent
from torchweft.errors import AlreadyInitialized, NotInitialized
from torchweft.patching import check_unpatched

here: Agent | None = None
"""The agent of this process; None if it is no worker."""
_forked_from = ""
_make_way: Callable[[], None] | None = None
_children: tuple[Agent, Children, Timer] | None = None
"""The children of an agent, once it has forked one."""


def current() -> Agent:
    """Returns the agent of this process.

    Raises:
        NotInitialized: ``init_rpc`` was not called, or the worker has shut down, or this process
            was forked from a worker.
    """
    if here is None:
        if _forked_from:
            raise NotInitialized(
                "RPC has not been initialized in this process, which was forked from worker "
                f"{_forked_from!r}: only that process is the worker; make calls there, for "
                "instance outside of the worker processes of a DataLoader"
            )
        raise NotInitialized(
            "RPC has not been initialized: call torchweft.init_rpc(...) first, or use "
            "'with torchweft.cluster(workers=3):'"
        )
    return here


def is_set() -> bool:
    """Whether this process is a worker now."""
    return here is not None


def is_forked() -> bool:
    """Whether this process is no worker, but was forked from one."""
    return here is None and bool(_forked_from)


def check_unset() -> None:
    """Raises AlreadyInitialized where this process is a worker already, and remains one.

    Raises ConfigurationError where it can be none; see ``patching``.
    """
    check_unpatched()
    if here is not None and _make_way is not None:
        _make_way()
    if here is not None:
        raise AlreadyInitialized(
            f"RPC is already initialized: this process is worker {here.info.name!r}; "
            "call torchweft.shutdown() before it joins another group"
        )


def when_in_the_way(make_way: Callable[[], None] | None) -> None:
    """Has ``make_way`` called before another group is joined; it may leave this one."""
    global _make_way
    _make_way = make_way


def install(agent: Agent | None) -> None:
    """Sets the current agent, or clears it with None."""
    global here, _forked_from
    here, _forked_from = agent, ""


def _prepare_fork() -> None:
    """Makes what parent and child share, in the parent."""
    global _children
    agent = here
    if agent is not None and (_children is None or _children[0] is not agent):
        children = Children()
        _children = agent, children, agent.timers.add(children.collect)


def _look_after_child() -> None:
    """Has the parent look whether the child ends as it comes back."""
    if _children is not None:
        _, children, timer = _children
        timer.wake_by(children.forked())


def _leave_to_parent() -> None:
    """Clears the agent in a forked process: only the parent is a worker.

    The child must also drop the parent's connections: otherwise no peer would notice the parent's
    death.
    """
    global here, _forked_from, _children
    agent, here = here, None
    shared, _children = _children, None
    if agent is not None:
        _forked_from = agent.info.name
        agent.abandon()
        children = shared[1] if shared is not None and shared[0] is agent else None
        end_when_back(agent.info.name, children, sys._getframe().f_back)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_prepare_fork,
        after_in_parent=_look_after_child,
        after_in_child=_leave_to_parent,
    )


_PACKAGE = str(Path(__file__).absolute().parents[2]) + os.sep
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
