"""The few threads that move large tensors over all data connections of one worker.

All of them wait in the same ``epoll_wait``, each connection armed for one event at a time, so one
thread at a time handles a connection. It moves what it can without waiting, at most a few
megabytes so that other connections get their turn, and arms the connection again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable

from torchweft.free_threading import LONGEST_WAIT_S

_log = logging.getLogger("torchweft")

NOTHING = 0
READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
WRITABLE = select.EPOLLOUT | select.EPOLLONESHOT

Handler = Callable[[], int]
"""Moves what it can without waiting; returns the event to await before its next call."""


def forget_nothing(fd: int) -> None:
    """Does nothing: for connections that no loop watches."""


class TransferLoop:
    """Calls handlers when their connections are ready. The first connection starts its threads.

    Args:
        name: Prefix of the threads' names.
        thread_count: How many threads.
    """

    def __init__(self, name: str, thread_count: int) -> None:
        self._name = name
        self._thread_count = thread_count
        self._handlers: dict[int, Handler] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._epoll: select.epoll | None = None
        self._close_fd = -1
        self._is_closing = False

    def watch(self, fd: int, handler: Handler, interest: int) -> None:
        """Has ``handler`` called when ``fd`` is ready.

        Args:
            fd: The descriptor.
            handler: What to call.
            interest: ``READABLE`` or ``WRITABLE``.

        Raises:
            ConnectionAbortedError: The loop is closed.
        """
        with self._lock:
            if self._is_closing:
                raise ConnectionAbortedError("this worker has shut down")
            if self._epoll is None:
                self._start()
            assert self._epoll is not None
            self._handlers[fd] = handler
            self._epoll.register(fd, interest)

    def arm(self, fd: int, interest: int) -> None:
        """Arms ``fd`` for one ``READABLE`` or ``WRITABLE`` event; ignores ``NOTHING``."""
        if interest and self._epoll is not None:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._epoll.modify(fd, interest)

    def forget(self, fd: int) -> None:
        """Stops watching ``fd``, before it is closed."""
        self._handlers.pop(fd, None)
        if self._epoll is not None:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Ends the threads and waits for them. Not from a handler."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            epoll, threads = self._epoll, self._threads
        if epoll is None:
            return
        os.eventfd_write(self._close_fd, 1)
        for thread in threads:
            thread.join()
        epoll.close()
        os.close(self._close_fd)

    def _start(self) -> None:
        self._epoll = select.epoll()
        # Level-triggered and never read: wakes all threads.
        self._close_fd = os.eventfd(0)
        self._epoll.register(self._close_fd, select.EPOLLIN)
        for number in range(1, self._thread_count + 1):
            thread = threading.Thread(
                target=self._serve, args=(self._epoll,), name=f"{self._name}-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # The system has no room for it now.
                if self._threads:
                    return  # One thread is enough.
                self._epoll.close()
                os.close(self._close_fd)
                self._epoll = None
                raise
            self._threads.append(thread)

    def _serve(self, epoll: select.epoll) -> None:
        while not self._is_closing:
            for fd, _ in epoll.poll(LONGEST_WAIT_S, 1):
                handler = self._handlers.get(fd)
                if handler is not None:
                    interest = _guarded(handler)
                    # Otherwise it was closed meanwhile, and another one may have its number.
                    if self._handlers.get(fd) is handler:
                        self.arm(fd, interest)


def _guarded(handler: Handler) -> int:
    try:
        return handler()
    except Exception:
        _log.exception("stripes could not be moved")
        return NOTHING
