"""Tensor messages: messages with tensors, encoded into frames and decoded again.

The layers above give a message (a head and a pickled payload) and the tensors that were taken out
of it. This module writes the table of the tensors and chooses a channel for every buffer; the
receiver reverses both. A message from a worker to itself touches neither bytes nor channels: its
tensors arrive by reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from torchweft import knobs
from torchweft.agent.agent import Agent
from torchweft.agent.data_connections import DataConnections
from torchweft.agent.fetching import Borrowing, Pulling, Source, read_request
from torchweft.agent.peers import Peer
from torchweft.channel.buffers import in_order, prepare
from torchweft.channel.copying import Copier
from torchweft.channel.shm.borrowed import end_dead_loans
from torchweft.channel.table import CMA, SHM, STRIPED, BufferTable, ChannelKind, decode_table
from torchweft.errors import ProtocolError
from torchweft.protocol.connecting import Outgoing
from torchweft.serialize import tensors as tensor_table
from torchweft.serialize.table import HEADER, SOME_COMPUTED
from torchweft.wire.frames import Buffer, Frame, encode_frame
from torchweft.wire.messages import (
    Kind,
    TensorMessageSections,
    decode_tensor_message,
    encode_tensor_message,
)

_CLOSE_LIMIT_S = 5.0


class TensorMessage:
    """A message with tensors, as received.

    Attributes:
        head: Bytes of the message kind's fixed layout.
        payload: The pickle; opaque here.
        table: Describes the tensors; empty if there are none.
        buffers: The memory of the tensors that has arrived.
        channel_table: The channels of the missing buffers; empty once all have arrived.
        externals: Other objects taken out of the pickle; only in a message to this worker itself.
    """

    __slots__ = (
        "_tensor_limit",
        "_tensors",
        "_worker",
        "buffers",
        "channel_table",
        "externals",
        "head",
        "payload",
        "table",
    )

    def __init__(
        self,
        sections: TensorMessageSections,
        buffers: Sequence[Buffer],
        worker: str,
        tensor_limit: int,
    ) -> None:
        self.head, self.payload, self.table, self.channel_table = sections
        self.externals: Sequence[object] | None = None
        self.buffers = buffers
        self._worker = worker
        self._tensor_limit = tensor_limit
        self._tensors: list[Tensor] | None = [] if not self.table else None

    @classmethod
    def local(cls, control: LocalMessage, worker: str) -> TensorMessage:
        """Returns a message from this worker to itself, whose tensors need no table."""
        message = cls(TensorMessageSections(control.head, control.payload, b"", b""), (), worker, 0)
        message._tensors = list(control.tensors)
        message.externals = control.externals
        return message

    @property
    def is_local(self) -> bool:
        """Whether the message came from this worker itself."""
        return self.externals is not None

    @property
    def some_require_grad(self) -> bool:
        """Whether some of its tensors required grad at the sender; False for a local message."""
        return bool(self.table) and tensor_table.some_require_grad(self.table)

    @property
    def some_are_computed(self) -> bool:
        """Whether some of its tensors have a graph at the sender; valid after ``tensors``."""
        # Inlined: it runs for every message with tensors.
        return bool(self.table) and bool(self.table[HEADER.size - 1] & SOME_COMPUTED)

    def flags(self) -> list[tensor_table.GradFlags]:
        """Returns the flags of each tensor for the autograd layer."""
        return tensor_table.grad_flags(self.table)

    def tensors(self, *, detached: bool) -> list[Tensor]:
        """Returns the tensors; each owns its memory.

        Args:
            detached: Whether tensors that required grad at the sender are returned without it.
        """
        if self._tensors is not None:
            return self._tensors
        return tensor_table.rebuild(
            self.table,
            self.buffers,
            detached=detached,
            worker=self._worker,
            limit=self._tensor_limit,
        )


class LocalMessage(NamedTuple):
    """A message from a worker to itself, in place of a frame's control part."""

    head: bytes
    payload: bytes
    tensors: Sequence[Tensor]
    externals: Sequence[object]


class TensorMessages:
    """Encodes and decodes tensor messages for one worker.

    Attributes:
        sources: The fetcher of each channel whose buffers do not follow the message.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._name = agent.info.name
        self._frame_limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        self._copier = Copier(f"weft-{agent.info.name}-copy")
        self._data = DataConnections(agent)
        self.sources: dict[ChannelKind, Source] = {
            CMA: Pulling(agent, self._copier),
            SHM: Borrowing(agent),
            STRIPED: self._data,
        }
        self._memory = agent.memory
        self._idle_s = knobs.POOL_IDLE_S.get()
        self._next_trim_s = 0.0
        agent.receiver.on(Kind.SUPPLY, self._on_supply, inline=True)

    def peer_lost(self, peer: Peer) -> None:
        """Fails the waits for tensors of a lost worker; takes back memory lent to it."""
        self.peer_disconnected(peer)
        peer.held.close()
        peer.channels.lose()

    def peer_disconnected(self, peer: Peer) -> None:
        """Fails the waits for tensors of a worker whose connection has ended."""
        self._data.give_up(peer)

    def close(self, limit_s: float = _CLOSE_LIMIT_S) -> None:
        """Sends waiting data, for at most ``limit_s``; ends the threads that move tensors."""
        self._data.close(limit_s)
        self._copier.close()

    def tick(self, now_s: float) -> float:
        """Frees pooled memory that has not been used for a while; a timer job."""
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + self._idle_s / 2
            end_dead_loans()
            self._agent.pool.trim(self._idle_s)
            if self._memory.pool is not None:
                self._memory.pool.trim(self._idle_s)
            for peer in list(self._agent.peers.values()):
                peer.channels.tidy()
        return self._next_trim_s

    def encode(
        self,
        peer: Peer,
        kind: Kind,
        flags: int,
        number: int,
        head: bytes,
        payload: bytes,
        tensors: Sequence[Tensor],
        externals: Sequence[object] = (),
    ) -> Outgoing:
        """Returns a message for ``Sender.send``.

        Tensors that will be pulled are kept until the peer has them.

        Args:
            peer: The receiver.
            kind: The kind of the message.
            flags: Flags of that kind.
            number: The call that the message belongs to, or 0.
            head: Bytes of that kind's fixed layout.
            payload: A pickle; opaque here.
            tensors: The tensors taken out of the pickle, in order.
            externals: Other objects taken out of the pickle; passed by reference, and only to this
                worker itself.
        """
        if peer.is_self:
            local = LocalMessage(head, payload, tensors, externals)
            return Frame(kind, flags, number, local, ())  # type: ignore[arg-type]
        if not tensors:
            return encode_frame(kind, flags, number, encode_tensor_message(head, payload, b"", b""))
        if len(tensors) > self._tensor_limit:
            raise tensor_table.too_many(len(tensors), self._tensor_limit)
        table, flat = tensor_table.describe(tensors)
        buffers = [tensor_table.as_memory(tensor) for tensor in flat]
        prepared = prepare(buffers, peer.channels, peer.held, self._copier, peer.reach_data)
        if prepared.table:
            self._agent.offered_bytes += sum(buffer.nbytes for buffer in buffers)
            self._agent.offered_bytes -= sum(buffer.nbytes for buffer in prepared.following)
        try:
            control = encode_tensor_message(head, payload, table, prepared.table)
        except ProtocolError:
            prepared.take_back(peer.channels, peer.held)
            raise
        frame = encode_frame(kind, flags, number, control, prepared.following)
        if prepared.striped:
            # Last: no tensor may begin to arrive of a message that cannot be sent after all.
            self._data.send(peer, prepared.token, prepared.striped, waits=kind == Kind.REPLY)
        return frame

    def read(self, frame: Frame) -> TensorMessage:
        """Decodes a received message, without fetching tensors.

        Raises:
            ProtocolError: The message is malformed.
        """
        control = frame.control
        if isinstance(control, LocalMessage):
            return TensorMessage.local(control, self._name)
        return TensorMessage(
            decode_tensor_message(control), frame.buffers, self._name, self._tensor_limit
        )

    def fetch(self, peer: Peer, message: TensorMessage) -> None:
        """Fetches tensors that did not come with the message. May block; not for reading threads.

        Raises:
            ProtocolError: The message is malformed.
            SerializationError: It has more tensors than this worker accepts.
            WorkerLost: The sender was lost before its tensors could be fetched.
        """
        if message.channel_table:
            if len(message.table) > self._tensor_limit * tensor_table.SMALLEST_BYTES:
                self._check_count(peer, message)
            message.buffers = self._fetch(peer, message)
            message.channel_table = b""

    def decode(self, peer: Peer, frame: Frame) -> TensorMessage:
        """Reads a message and fetches its tensors; see ``read`` and ``fetch``."""
        message = self.read(frame)
        if message.channel_table:
            self.fetch(peer, message)
        return message

    def discard(self, peer: Peer, message: TensorMessage) -> None:
        """Tells the sender to release the tensors of a message that will not be read."""
        if message.channel_table:
            table = self._read_table(message)
            for kind in _fetched_kinds(table):
                self._source(peer, kind).drop(peer, table)

    def _check_count(self, peer: Peer, message: TensorMessage) -> None:
        count = tensor_table.count_of(message.table)
        if count > self._tensor_limit:
            self.discard(peer, message)
            raise tensor_table.too_many(count, self._tensor_limit, self._name)

    def _read_table(self, message: TensorMessage) -> BufferTable:
        sizes = [len(buffer) for buffer in message.buffers]
        return decode_table(message.channel_table, sizes, self._frame_limit_bytes)

    def _fetch(self, peer: Peer, message: TensorMessage) -> Sequence[Buffer]:
        table = self._read_table(message)
        fetched = {
            kind: self._source(peer, kind).fetch(peer, table) for kind in _fetched_kinds(table)
        }
        return in_order(table, message.buffers, fetched)

    def _on_supply(self, peer: Peer, frame: Frame) -> None:
        """Sends, behind a message, buffers that did not reach the peer over their channel.

        Inline: the request must not wait for a free thread.
        """
        token, kind = read_request(frame.control)
        buffers: Sequence[memoryview]
        if kind == STRIPED:
            buffers = self._data.take_kept(peer, token)
        else:
            buffers = peer.held.release(token) or ()
            reason = f"worker {peer.name!r} cannot read this process's memory"
            peer.channels.disable(CMA, reason)
        self._agent.sender.post(peer, encode_frame(Kind.REPLY, 0, frame.id, b"", buffers))

    def _source(self, peer: Peer, kind: ChannelKind) -> Source:
        source = self.sources.get(kind)
        if source is None:
            raise ProtocolError(
                f"worker {peer.name!r} sends by {kind.name}, which this worker has not offered"
            )
        return source


def _fetched_kinds(table: BufferTable) -> list[ChannelKind]:
    # SHM cannot fail and comes first: no loan is forgotten when another channel fails.
    present = {entry.kind for entry in table.entries}
    return [kind for kind in (SHM, CMA, STRIPED) if kind in present]
