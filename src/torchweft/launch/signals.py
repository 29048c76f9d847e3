"""Hands signals to the loop of a run, so that nothing is done in the middle of something else."""

from __future__ import annotations

import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def watched_signals(
    watch: Callable[[int, Callable[[], object]], None], on_signal: Callable[[int], None]
) -> Iterator[None]:
    """Has signals that ask this process to end be handled in its loop, within a ``with`` block.

    Args:
        watch: Has the loop call a function when a descriptor is readable.
        on_signal: Called in the loop with the number of each signal, in order.
    """
    signals: deque[int] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    def handle() -> None:
        wake_read.recv(4096)
        while signals:
            on_signal(signals.popleft())

    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    watch(wake_read.fileno(), handle)
    handlers = {number: signal.signal(number, note) for number in NUMBERS}
    wake_fd = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wake_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wake_read.close()
        wake_write.close()
