"""The channels of one worker, and how two workers find out which of them work.

Both sides describe themselves when they connect. Each side then tests on which channels it can
*receive* from the other, and reports the result in a verdict. A side sends on a channel once the
peer's verdict confirms it: what works in one direction may fail in the other. A channel that fails
at run time is given up for that peer and direction, with one warning.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torchweft.engine.channels.channel import Channel, Home, Meeting, Peer, Ways
from torchweft.engine.channels.cuda import CudaIpc
from torchweft.engine.channels.pull import Pull
from torchweft.engine.channels.rdma import Rdma
from torchweft.engine.channels.shm import SharedMemory
from torchweft.engine.channels.stripes import Stripes
from torchweft.engine.threads.reports import log_exception
from torchweft.errors import ProtocolError
from torchweft.probe import Facts, read_facts

CHANNELS: tuple[type[Channel], ...] = (CudaIpc, SharedMemory, Pull, Rdma, Stripes)
"""All channels, in order of preference: a buffer takes the first one that has room for it."""

_FACTS = "facts"

C = TypeVar("C", bound=Channel)


class Channels:
    """All channels of one worker. Thread-safe.

    Attributes:
        home: What channels need of the worker.
        by_number: The channels by their numbers, in order of preference.
        offered_bytes: Size of all buffers that were sent over channels, but for those lent.
        lent_bytes: Size of all buffers that were sent without a copy.
        pulled_bytes: Size of all buffers that were got.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.by_number = {channel.number: channel(home) for channel in CHANNELS}
        self._here = read_facts()
        self._told = {channel.name: channel.describe() for channel in self.all}
        self._next_trim_s = 0.0
        self.offered_bytes = self.lent_bytes = self.pulled_bytes = 0

    @property
    def all(self) -> tuple[Channel, ...]:
        """The channels, in order of preference."""
        return tuple(self.by_number.values())

    def of(self, channel: type[C]) -> C:
        """Returns the channel of a type."""
        found = self.by_number[channel.number]
        assert isinstance(found, channel)
        return found

    # Meeting a peer

    def describe(self) -> dict[str, Any]:
        """Returns what the channels of this side can do, for a greeting."""
        return {_FACTS: self._here.as_json(), **self._told}

    @contextlib.contextmanager
    def handed_over(self, connection: socket.socket) -> Iterator[int | None]:
        """Yields the descriptor to send with the next greeting; None if there is none to send.

        A descriptor travels over Unix sockets only.
        """
        descriptor = None
        if connection.family == socket.AF_UNIX:
            found = (channel.hand_over() for channel in self.all)
            descriptor = next((each for each in found if each is not None), None)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def meet(
        self, peer: Peer, connection: socket.socket, told: object, descriptors: list[int]
    ) -> None:
        """Tests by which channels this process can receive from a peer that connects.

        Args:
            peer: The peer.
            connection: The connection to it.
            told: What ``describe`` returned there.
            descriptors: The descriptors that came with its greeting, if any; they are closed.

        Raises:
            ProtocolError: ``told`` is malformed.
        """
        try:
            facts, by_name = read_description(told)
            descriptor = descriptors[0] if descriptors else None
            verdict = {}
            for channel in self.all:
                told_of = by_name[channel.name]
                met = Meeting(self._here, facts, told_of, connection, descriptor)
                verdict[channel.name] = channel.accept(peer, met)
            peer.ways = Ways(peer.name, self.all, verdict)
        finally:
            close_all(descriptors)

    def take(self, peer: Peer, connection: socket.socket, number: int) -> None:
        """Takes a connection that a peer has dialled for one of the channels.

        Raises:
            OSError: The peer is lost, or this worker has shut down.
        """
        if not any(channel.take(peer, connection, number) for channel in self.all):
            raise ConnectionAbortedError("no channel takes connections")

    # Housekeeping

    def tick(self, now_s: float) -> float:
        """Frees memory that has not been used for a while; a timer job. Returns its next time."""
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + self.home.idle_s / 2
            self._each(lambda channel: channel.tick(now_s))
            self.home.pool.trim(self.home.idle_s)
        return self._next_trim_s

    def lost(self, peer: Peer) -> None:
        """Fails the waits for tensors of a worker that is lost; takes back memory lent to it."""
        self._each(lambda channel: channel.lost(peer))

    def abandon(self) -> None:
        """Frees all descriptors in a forked process; takes no lock."""
        for channel in self.all:
            channel.abandon()

    def close(self, limit_s: float) -> None:
        """Sends waiting data, for at most ``limit_s``; ends the threads that move tensors."""
        self._each(lambda channel: channel.close(limit_s))
        self.home.copier.close()

    def _each(self, do: Callable[[Channel], None]) -> None:
        for channel in self.all:
            try:
                do(channel)
            except Exception:  # The others are done nevertheless.
                log_exception(f"channel {channel.name} could not be cleaned up")


def read_description(told: object) -> tuple[Facts, dict[str, dict[str, Any]]]:
    """Reads what ``Channels.describe`` returned at a peer, by the names of the channels here.

    Raises:
        ProtocolError: It is malformed.
    """
    if not isinstance(told, dict):
        raise ProtocolError(f"a peer tells a {type(told).__name__} of its channels, not an object")
    by_name = {channel.name: told.get(channel.name, {}) for channel in CHANNELS}
    if not all(isinstance(each, dict) for each in by_name.values()):
        raise ProtocolError("a peer's descriptions of its channels are to be objects")
    return Facts.from_json(told.get(_FACTS)), by_name


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors that came with a greeting."""
    while descriptors:
        os.close(descriptors.pop())
