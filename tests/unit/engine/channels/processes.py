"""A second process for tests that read another one's memory."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def forked(body: Callable[[socket.socket], None]) -> Iterator[tuple[int, socket.socket]]:
    """Runs ``body`` in a forked child; yields the child's process id and a socket to it.

    The end of the block closes the socket; ``body`` must then return. ``body`` must use nothing
    that another thread of this process might hold, such as torch's thread pools.
    """
    here, there = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: see above
        pid = os.fork()
    if not pid:
        here.close()
        _run_and_exit(body, there)
    there.close()
    try:
        yield pid, here
    finally:
        here.close()
        os.waitpid(pid, 0)


def _run_and_exit(body: Callable[[socket.socket], None], link: socket.socket) -> None:
    try:
        body(link)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def dead_pid() -> int:
    """Returns the id of a process that has ended."""
    with forked(lambda link: None) as (pid, _):
        pass
    return pid
