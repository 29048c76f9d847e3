"""Buffers that the receiver fetches: one source for each channel.

If they do not arrive over their channel, the receiver asks the sender for them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from torchweft.agent.agent import Agent
from torchweft.agent.calls import PendingCall
from torchweft.agent.peers import Peer
from torchweft.channel.buffers import pull_buffers
from torchweft.channel.cma import PullError
from torchweft.channel.copying import Copier
from torchweft.channel.cuda import await_all
from torchweft.channel.table import CMA, SHM, BufferTable, ChannelKind
from torchweft.errors import ProtocolError
from torchweft.protocol.calls import SimpleRequest
from torchweft.wire.frames import Buffer, encode_frame
from torchweft.wire.messages import Kind, decode_ints, encode_ints


def ask_for_supply(
    agent: Agent,
    peer: Peer,
    token: int,
    kind: ChannelKind,
    sizes: list[int],
    reason: Exception,
) -> Sequence[Buffer]:
    """Has the sender of a message resend its buffers of one kind behind a message. Blocks.

    Raises:
        WorkerLost: The sender was lost before the buffers came.
        ProtocolError: The sender no longer has the buffers, or sent buffers of other sizes.
    """
    call = PendingCall(peer.id, peer.name, "resend of tensors", math.inf)
    request = encode_ints(token, kind)
    agent.calls.ask_and_wait(
        peer, call, SimpleRequest(lambda number: encode_frame(Kind.SUPPLY, 0, number, request))
    )
    if call.error is not None:
        raise call.error
    assert call.frame is not None
    if [len(buffer) for buffer in call.frame.buffers] != sizes:
        raise ProtocolError(
            f"worker {peer.name!r} could not resend tensors that did not come: {reason}"
        )
    return call.frame.buffers


def read_request(control: Buffer) -> tuple[int, int]:
    """Decodes a ``SUPPLY``: the token of the message, and the kind of the buffers.

    Raises:
        ProtocolError: The request is malformed.
    """
    values = decode_ints(control)
    if len(values) != 2:
        raise ProtocolError(f"a request to send again has {len(values)} numbers")
    return values[0], values[1]


class Waiting:
    """Waits for events of a peer; the thread does not count as running meanwhile.

    Args:
        agent: The worker's agent.
        peer: The peer, whose loss ends the wait.
        limit_s: How long to wait at most.
    """

    def __init__(self, agent: Agent, peer: Peer, limit_s: float) -> None:
        self._agent = agent
        self._peer = peer
        self._limit_s = limit_s
        self._is_counted = False

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_counted:
            self._agent.reactor.end_wait()

    def for_events(self, events: Sequence[Any]) -> None:
        """Blocks until ``query`` of all events returns True; see ``await_all``."""
        await_all(events, self._check, self._begin, self._limit_s)

    def _begin(self) -> None:
        self._is_counted = self._agent.reactor.begin_wait()

    def _check(self) -> None:
        if self._peer.is_over:
            raise self._peer.lost_error()
        self._agent.lifetime.check_open()


class Source(Protocol):
    """Fetches the buffers that come over one channel."""

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        """Returns the buffers of ``table`` that use this channel, in order. May block.

        On failure, this method fetches the buffers over another channel.

        Raises:
            ProtocolError: The sender's table is impossible.
            WorkerLost: The sender was lost before its buffers could be fetched.
        """

    def drop(self, peer: Peer, table: BufferTable) -> None:
        """Returns the memory of these buffers to the sender: they will not be fetched."""


class Borrowing:
    """Buffers that the sender has put into its shared memory, which is mapped here.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        borrowed = peer.channels.borrowed()
        if len(table.entries) == 1:
            buffer = borrowed.take(table.entries[0])
            self._agent.note_pulled(peer, "shm", len(buffer))
            return (buffer,)
        buffers = [borrowed.take(entry) for entry in table.of_kind(SHM)]
        self._agent.note_pulled(peer, "shm", sum([len(buffer) for buffer in buffers]))
        return buffers

    def drop(self, peer: Peer, table: BufferTable) -> None:
        borrowed = peer.channels.borrowed()
        for entry in table.of_kind(SHM):
            borrowed.refuse(entry)


class Pulling:
    """Buffers that are copied out of the sender's memory, which the sender keeps until then.

    If a copy fails, the sender is asked to stream the buffers, and no longer offers this channel.

    Args:
        agent: The worker's agent.
        copier: Does the copies.
    """

    def __init__(self, agent: Agent, copier: Copier) -> None:
        self._agent = agent
        self._copier = copier

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        try:
            pulled = pull_buffers(table, peer.channels, self._agent.pool, self._copier)
        except PullError as error:
            sizes = [entry.size_bytes for entry in table.of_kind(CMA)]
            return ask_for_supply(self._agent, peer, table.token, CMA, sizes, error)
        self._agent.note_pulled(peer, "cma", sum([len(buffer) for buffer in pulled]))
        self.drop(peer, table)
        return pulled

    def drop(self, peer: Peer, table: BufferTable) -> None:
        self._agent.sender.post_ints(peer, Kind.PULLED, table.token)
