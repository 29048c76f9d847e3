"""A pair of connected sockets that many inputs use one after the other."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

_LARGEST_BYTES = 1 << 16
"""More than both sides send for one input."""


class SocketPair:
    """Two connected sockets, for one input at a time."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self._trash = bytearray(_LARGEST_BYTES)

    def empty(self) -> None:
        """Takes out of both sockets all that the last input has left in them."""
        for sender, receiver in ((self.theirs, self.ours), (self.ours, self.theirs)):
            sender.send(b"\0")  # So there is something, and no error is raised.
            receiver.recv_into(self._trash)

    def renew(self) -> None:
        """Replaces the sockets, after an input that has shut them down."""
        self.close()
        self.ours, self.theirs = socket.socketpair()

    def close(self) -> None:
        """Closes both sockets."""
        self.ours.close()
        self.theirs.close()


@contextlib.contextmanager
def socket_pair() -> Iterator[SocketPair]:
    """Yields a pair of sockets, and closes it."""
    with contextlib.closing(SocketPair()) as pair:
        yield pair
