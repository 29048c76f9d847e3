"""Interrupts of the main thread: signal handlers run in that thread, and may raise.

Ctrl-C raises ``KeyboardInterrupt`` between any two steps of Python code there: after a function has
returned and before its result is stored, also within ``finally``. Two things are safe:

* A single call of a function written in C, however much it does.
* ``with lock:``, for a lock written in C, releases the lock whatever is raised.

A handler may itself call, and a finalizer too, in any thread: the garbage collector runs it between
any two steps. So a lock that a call takes is reentrant, unless it is only tried.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import signal
import sys
import threading
from _signal import getsignal  # type: ignore[import-not-found]
from _thread import LockType, allocate_lock, get_ident
from collections.abc import Callable
from functools import partial
from itertools import compress, takewhile
from operator import attrgetter
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")

call: Callable[[Any], Any] = getattr(operator, "call", operator.methodcaller("__call__"))
"""Calls its argument; with ``map``, several functions in one step."""


class Flag:
    """Is set once; a thread that waits for it may be interrupted at any step.

    A handler that runs in the waiting thread holds up no thread that sets the flag, as the lock of
    a ``threading.Event`` would.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire(False)

    def set(self) -> None:
        """Sets the flag, and wakes the waiting threads."""
        with contextlib.suppress(RuntimeError):  # It was set before.
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the flag is set or for ``timeout_s``; returns whether it is set."""
        return wait_for(self._lock, timeout_s)


def wait_for(lock: LockType, timeout_s: float) -> bool:
    """Blocks until a lock is free or for ``timeout_s``; returns whether it is free."""
    bounded_s = -1 if timeout_s > threading.TIMEOUT_MAX else max(timeout_s, 0)
    acquire = partial(lock.acquire, True, bounded_s)
    # Acquire and release in one step.
    return [*takewhile(bool, map(call, (acquire, lock.release)))] != []


class Lock(Protocol):
    """A lock that is written in C."""

    def acquire(self, blocking: bool = ..., timeout: float = ..., /) -> bool:
        """Acquires the lock; returns whether it did."""


def acquire(lock: Lock, taken: list[bool], blocking: bool = True, timeout_s: float = -1) -> bool:
    """Acquires a lock, and notes in ``taken`` whether it did, in one step. Blocks.

    Ctrl-C may come between two steps of the main thread. Then a lock that was taken, and of which
    nothing knows, would stay locked for ever. Call this within ``try``, whose ``finally`` releases
    the lock if ``taken`` is ``[True]``.

    Args:
        lock: The lock.
        taken: An empty list.
        blocking: Whether to wait for the lock.
        timeout_s: For how long; -1 for no limit.

    Returns:
        Whether the lock was acquired.
    """
    taken += map(lock.acquire, (blocking,), (timeout_s,))
    return taken == [True]


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler of the program raised an error: it is the program's alone.

    So is what is no ``Exception`` in the main thread, as Ctrl-C: its handler has no frame.

    For code that reports errors of other code under another name: it passes these on.
    """
    if threading.get_ident() != main_id:
        return False
    if not isinstance(error, Exception):
        return True
    # The function in C: that of ``signal`` makes a member of an enumeration of each handler.
    handlers = {_code_of(each) for each in map(getsignal, range(1, signal.NSIG)) if callable(each)}
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in handlers:
            return True
        step = step.tb_next
    return False


def _code_of(handler: object) -> object:
    """Returns the code of a signal handler; None for what is no function of Python."""
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__call__", None)  # noqa: B004
    return getattr(function, "__code__", None)


main_id = threading.main_thread().ident
"""The identifier of the main thread."""


def current_frames() -> dict[int, FrameType]:
    """Returns what each thread runs now, by the thread's identifier.

    Before CPython 3.12, ``sys._current_frames`` may run the garbage collector while it holds the
    lock of the interpreter's list of threads. A finalizer, or a function in ``gc.callbacks``, then
    lets another thread run; if that one needs the same lock, all threads stop for ever
    (https://github.com/python/cpython/issues/106883). So the collector is off meanwhile. All is one
    step: no other thread sees it off.

    The result must not be stored in a local variable, here neither. A frame whose function has
    returned keeps its variables, and the frame of the caller is among the result: it would keep
    itself, and all that the other threads' functions held, until the collector runs.
    """
    return without_collector(sys._current_frames)


def without_collector(step: Callable[[], T]) -> T:
    """Calls a function written in C, before CPython 3.12 with the garbage collector off.

    The collector is as before afterwards, also where other threads turn it on or off. From 3.12
    on, it runs only between two steps of Python code.
    """
    if sys.version_info >= (3, 12):
        return step()
    was_on: list[bool] = []
    restore = partial(tuple, map(call, compress((gc.enable,), was_on)))
    steps = (partial(was_on.extend, map(call, (gc.isenabled,))), gc.disable, step, restore)
    try:
        return cast(T, tuple(map(call, steps))[2])
    except BaseException:  # There is no memory.
        restore()
        raise


def _note_main() -> None:
    global main_id
    main_id = get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main)


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
