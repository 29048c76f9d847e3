"""Handles signals that ask a process to end where it waits, not in the middle of other work.

The main thread runs Python's signal handlers, between two of its steps. A signal does not end a
wait for a lock if it arrives just as the main thread begins to wait, or on another thread. So
the waits here are for a descriptor, to which the interpreter itself writes, whichever thread the
signal reaches and whenever.
"""

from __future__ import annotations

import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torchweft import knobs

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def stacks_signal() -> int | None:
    """Returns the signal on which a worker writes its stacks; None if there is none."""
    number: int | None = vars(signal).get(knobs.STACKS_SIGNAL.get())
    return number


@contextmanager
def watched_signals(
    selector: selectors.BaseSelector, on_signal: Callable[[int], None]
) -> Iterator[None]:
    """Handles signals to this process in its loop, within a ``with`` block.

    They ask the process to end, or (``SIGQUIT``) to say what the workers do.

    Args:
        selector: The loop calls ``data`` of what is readable.
        on_signal: Called in the loop with the number of each signal, in order.
    """
    signals: deque[int] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    def handle() -> None:
        wake_read.recv(4096)
        while signals:
            on_signal(signals.popleft())

    with _wakeups() as wake_read:
        wake_read.setblocking(False)
        selector.register(wake_read, selectors.EVENT_READ, handle)
        handlers = {number: signal.signal(number, note) for number in NUMBERS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


class AwaitedSignal:
    """A signal for which the main thread waits when it has no other work.

    Args:
        number: The signal. From now on it has no other effect.
    """

    def __init__(self, number: int) -> None:
        self._has_come = False
        signal.signal(number, self._note)

    def wait(self) -> None:
        """Blocks until the signal arrives; returns at once if it has already arrived."""
        with _wakeups() as wake_read:
            while not self._has_come:
                wake_read.recv(4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True


@contextmanager
def _wakeups() -> Iterator[socket.socket]:
    """Makes a socket that becomes readable whenever a signal has arrived."""
    wake_read, wake_write = socket.socketpair()
    with wake_read, wake_write:
        wake_write.setblocking(False)
        former = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        try:
            yield wake_read
        finally:
            signal.set_wakeup_fd(former)
