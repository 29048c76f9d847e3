"""The sender's side: which way each buffer takes, and what must be kept until it was pulled."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

from weft.channel.choice import Channels
from weft.channel.cma import address_of
from weft.channel.table import CMA, BufferEntry, encode_table


class HeldStatistics(NamedTuple):
    """What a peer has not pulled yet."""

    message_count: int
    size_bytes: int


class HeldTensors:
    """Keeps the memory that one peer is going to pull, until it says that it has.

    Nothing is copied: whoever writes to that memory before it was pulled changes what the peer
    gets, as with any send that has not completed. Thread-safe.
    """

    def __init__(self) -> None:
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._held: dict[int, Sequence[memoryview]] = {}
        self._size_bytes = 0
        self._is_closed = False

    def hold(self, buffers: Sequence[memoryview]) -> int:
        """Keeps ``buffers``; returns the token that ``release`` takes."""
        token = next(self._tokens)
        size_bytes = _size(buffers)
        with self._lock:
            if not self._is_closed:
                self._held[token] = buffers
                self._size_bytes += size_bytes
        return token

    def release(self, token: int) -> Sequence[memoryview] | None:
        """Lets go of what ``token`` stands for, and returns it; None if that happened already.

        A peer that failed to pull is sent what this returns another way.
        """
        with self._lock:
            buffers = self._held.pop(token, None)
            if buffers is not None:
                self._size_bytes -= _size(buffers)
        return buffers

    def close(self) -> None:
        """Lets go of everything, now and in future: the peer will pull no more."""
        with self._lock:
            self._is_closed = True
            # Dropped after the lock: the end of a tensor may run any code.
            dropped, self._held = self._held, {}
            self._size_bytes = 0
        dropped.clear()

    def statistics(self) -> HeldStatistics:
        """Returns how much is held now."""
        with self._lock:
            return HeldStatistics(len(self._held), self._size_bytes)


def _size(buffers: Sequence[memoryview]) -> int:
    return sum([buffer.nbytes for buffer in buffers])


def prepare(
    buffers: Sequence[memoryview], channels: Channels, held: HeldTensors
) -> tuple[bytes, Sequence[memoryview]]:
    """Chooses a way for every buffer of a message.

    Args:
        buffers: Contiguous memory, in the order of the message's tensors.
        channels: The ways to the peer.
        held: Keeps what the peer will pull.

    Returns:
        The buffer table for the control part, and the buffers that are to follow it.
    """
    if not buffers:
        return b"", buffers
    channel_for = channels.channel_for
    if len(buffers) == 1 and channel_for(buffers[0].nbytes) != CMA:
        return b"", buffers
    kinds = [channel_for(buffer.nbytes) for buffer in buffers]
    if CMA not in kinds:
        return b"", buffers
    entries: list[BufferEntry] = []
    pulled: list[memoryview] = []
    following: list[memoryview] = []
    for kind, buffer in zip(kinds, buffers, strict=True):
        is_pulled = kind == CMA
        (pulled if is_pulled else following).append(buffer)
        entries.append(BufferEntry(kind, buffer.nbytes, address_of(buffer) if is_pulled else 0))
    return encode_table(held.hold(pulled), entries), following
