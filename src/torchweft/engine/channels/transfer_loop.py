"""The few threads that move large tensors, and the data connections of one worker that they serve.

All of them wait in the same ``epoll_wait``, each connection armed for one event at a time, so one
thread at a time handles a connection. It moves what it can without waiting, at most a few
megabytes so that other connections get their turn, and arms the connection again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable

from torchweft.free_threading import LONGEST_WAIT_S

_log = logging.getLogger("torchweft")

NOTHING = 0
READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
WRITABLE = select.EPOLLOUT | select.EPOLLONESHOT

Handler = Callable[[], int]
"""Moves what it can without waiting; returns the event to await before its next call."""


OnEnd = Callable[[str], None]
"""Takes the cause for which a connection has ended."""


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
            epoll = self._epoll = self._epoll or select.epoll()
            self._start(epoll)
            self._handlers[fd] = handler
            epoll.register(fd, interest)

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
        # Level-triggered and never read: wakes all threads.
        close_fd = os.eventfd(1)
        epoll.register(close_fd, select.EPOLLIN)
        for thread in threads:
            thread.join()
        epoll.close()
        os.close(close_fd)

    def _start(self, epoll: select.epoll) -> None:
        """Starts the threads that are missing; one is enough where the system has room for few."""
        while len(self._threads) < self._thread_count:
            name = f"{self._name}-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._serve, args=(epoll,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _serve(self, epoll: select.epoll) -> None:
        while not self._is_closing:
            for fd, _ in epoll.poll(LONGEST_WAIT_S, 1):
                handler, interest = self._handlers.get(fd), NOTHING
                if handler is not None:
                    try:
                        interest = handler()
                    except Exception:
                        _log.exception("stripes could not be moved")
                    # Otherwise it was closed meanwhile, and another one may have its number.
                    if self._handlers.get(fd) is handler:
                        self.arm(fd, interest)


class Connection:
    """One data connection.

    Args:
        connection: A connected socket; owned from here on.
        on_end: Called with the cause when the connection ends.
    """

    def __init__(self, connection: socket.socket, on_end: OnEnd) -> None:
        self._socket = connection
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_closed = False
        connection.setblocking(False)
        self.fd = connection.fileno()

    def abandon(self) -> None:
        """Frees the descriptor in a forked process; its parent keeps the connection."""
        self._socket.close()

    def close(self, forget: Callable[[int], None] | None = None) -> None:
        """Ends the connection and frees its descriptor; drops the stripe that is being moved.

        Args:
            forget: Called with the descriptor before it is freed, but not by a second ``close``:
                another connection may have the descriptor by then.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            dropped = self._drop()
            if forget is not None:
                forget(self.fd)
            self._socket.close()
        del dropped  # Outside the lock: freeing a tensor may run any code.

    def _drop(self) -> object:
        """Gives up the stripe that is being moved; returns its memory."""
