"""Exchanges shared memory between this worker and its peers."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from torchweft import knobs
from torchweft.channel.choice import Channels
from torchweft.channel.shm.lending import Lender
from torchweft.channel.shm.liveness import peer_of
from torchweft.channel.shm.pool import make_pool


class MemoryExchange:
    """Hands this worker's shared memory to peers as they connect, and maps the memory of peers.

    A descriptor travels over Unix sockets only, behind a greeting that answers one with the secret
    of the run: no other process gets it. A peer in another container gets it as well, if it reaches
    this worker by such a socket.

    Attributes:
        pool: This worker's shared memory; None if there is none.
    """

    def __init__(self) -> None:
        self.pool = make_pool(knobs.SHM_LIMIT_BYTES.get())

    @property
    def nonce(self) -> str:
        """The nonce at the start of the memory, in hexadecimal digits; empty without memory."""
        return "" if self.pool is None else self.pool.area.nonce.hex()

    @contextlib.contextmanager
    def descriptor_for(self, connection: socket.socket) -> Iterator[int | None]:
        """Yields the descriptor to send with the next greeting; None if there is none to send."""
        descriptor = None
        if self.pool is not None and connection.family == socket.AF_UNIX:
            descriptor = self.pool.duplicate()
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def lend(self, channels: Channels, connection: socket.socket) -> None:
        """Lends to the connected peer, once that peer confirms that it can borrow."""
        if self.pool is not None and connection.family == socket.AF_UNIX:
            channels.lend_by(Lender(self.pool, peer_of(connection)))

    def close(self) -> None:
        """Stops lending; memory in use stays."""
        if self.pool is not None:
            self.pool.close()


def map_memory(channels: Channels, descriptors: list[int], nonce: str) -> None:
    """Maps the memory that came with a peer's greeting, if any, and closes the descriptor."""
    try:
        channels.map_memory(descriptors[0] if descriptors else None, nonce)
    finally:
        close_all(descriptors)


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors that came with a greeting."""
    while descriptors:
        os.close(descriptors.pop())
