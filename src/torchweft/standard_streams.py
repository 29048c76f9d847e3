"""Standard streams that are closed or missing, as in a daemon or under some schedulers.

The system gives the number of a closed descriptor to the next file or socket that is opened. If
descriptor 1 or 2 became the number of a socket, whatever C++ code or a child process prints would
go to another worker. So the null device takes the place of closed descriptors first. A process of
Weft's own opens its missing streams as well: Python has None in place of a stream that was closed
at its start, and the workers that this process forks would never have one.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

_NAMES = ("stdin", "stdout", "stderr")


def reserve_descriptors() -> None:
    """Opens the null device in place of each standard descriptor that is closed."""
    for number in range(len(_NAMES)):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:  # Another thread has taken the number meanwhile, or a lower one.
                os.close(null)
                continue
            os.set_inheritable(number, True)


def open_missing() -> None:
    """Gives this process the standard streams that it lacks; for processes of Weft's own."""
    reserve_descriptors()
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            raw = io.FileIO(number, mode, closefd=False)
            opened = io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)


def drop_output() -> None:
    """Has standard output drop its data: the interpreter would complain at exit about the rest."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # It is missing, or in memory.
        drop(sys.stdout.fileno())


def drop(descriptor: int) -> None:
    """Puts the null device in place of a descriptor that nobody reads any more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def flush() -> None:
    """Flushes the standard streams; one that is missing, closed or broken is passed over."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # The program may have put any object there.
            stream.flush()
