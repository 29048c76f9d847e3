"""The agent's part in buffers that the receiver fetches: one source for every way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft import knobs
from weft.agent.agent import Agent
from weft.agent.calls import PendingCall
from weft.agent.peers import Peer
from weft.channel.cma import PullError
from weft.channel.copying import Copier
from weft.channel.receiving import pull_buffers
from weft.channel.table import CMA, SHM, BufferTable
from weft.errors import ProtocolError
from weft.wire.frames import Buffer, Frame, encode_frame
from weft.wire.messages import Kind, encode_ints


class Source(Protocol):
    """Fetches the buffers that come one way."""

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        """Returns those buffers of ``table`` that come this way, in order. May block.

        What fails is tried another way in here; the sender is told not to use this one again.

        Raises:
            ProtocolError: The sender says what cannot be.
            WorkerLost: The sender was lost before its buffers could be fetched.
        """

    def drop(self, peer: Peer, table: BufferTable) -> None:
        """Has the sender get its memory back: nobody will fetch these buffers."""


class Borrowing:
    """Buffers that the sender has put into its shared memory, which is mapped here.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        borrowed = peer.channels.borrowed()
        buffers = [borrowed.take(entry) for entry in table.of_kind(SHM)]
        self._agent.pulled_bytes += sum(len(buffer) for buffer in buffers)
        return buffers

    def drop(self, peer: Peer, table: BufferTable) -> None:
        borrowed = peer.channels.borrowed()
        for entry in table.of_kind(SHM):
            borrowed.refuse(entry)


class Pulling:
    """Buffers that are copied out of the sender's memory, which the sender keeps until then.

    Where that fails the sender is asked to stream them, and offers this way no more.

    Args:
        agent: The worker's agent; ``SUPPLY`` messages are handled here.
        copier: Does the copies.
    """

    def __init__(self, agent: Agent, copier: Copier) -> None:
        self._agent = agent
        self._copier = copier
        agent.on(Kind.SUPPLY, self._on_supply, inline=True)

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        try:
            pulled = pull_buffers(table, peer.channels, self._agent.pool, self._copier)
        except PullError as error:
            return self._ask_for_supply(peer, table, error)
        self._agent.pulled_bytes += sum(len(buffer) for buffer in pulled)
        self.drop(peer, table)
        return pulled

    def drop(self, peer: Peer, table: BufferTable) -> None:
        self._agent.post_ints(peer, Kind.PULLED, table.token)

    def _ask_for_supply(self, peer: Peer, table: BufferTable, error: PullError) -> Sequence[Buffer]:
        """Has the sender stream what could not be pulled, and stop offering it that way."""
        call = PendingCall(peer.id, peer.name, "resend of tensors", knobs.RPC_TIMEOUT_S.get())
        request = encode_ints(table.token)
        self._agent.calls.ask_and_wait(
            peer, call, lambda number: encode_frame(Kind.SUPPLY, 0, number, request)
        )
        if call.error is not None:
            raise call.error
        assert call.frame is not None
        expected = [entry.size_bytes for entry in table.of_kind(CMA)]
        if [len(buffer) for buffer in call.frame.buffers] != expected:
            raise ProtocolError(
                f"worker {peer.name!r} could not resend tensors that were not readable: {error}"
            )
        return call.frame.buffers

    def _on_supply(self, peer: Peer, frame: Frame) -> None:
        """Streams what the peer could not pull. Inline: it must not wait for a free thread."""
        buffers = peer.held.release(int.from_bytes(frame.control[:8], "little")) or ()
        peer.channels.disable(CMA, f"worker {peer.name!r} cannot read this process's memory")
        self._agent.post(peer, encode_frame(Kind.REPLY, 0, frame.id, b"", buffers))
