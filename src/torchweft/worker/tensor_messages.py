"""Messages whose tensors travel by tables and channels.

The layers above give the front of a message and the tensors that were taken out of its value. This
module writes the table of the tensors and chooses a channel for every buffer; the receiver reverses
both. Small tensors stand in the message itself instead; see ``serialize.tensors``. A message from a
worker to itself touches neither bytes nor channels: its tensors arrive by reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchweft import knobs
from torchweft.channel.channel import Received
from torchweft.channel.channels import Parcel
from torchweft.errors import ProtocolError, WeftError
from torchweft.serialize.tensors import (
    ON_DEVICE,
    Entry,
    describe,
    devices_of,
    read,
    rebuild,
    too_many,
)
from torchweft.threads.device_streams import Mark
from torchweft.wire.frames import Buffer, Frame, encode_frame
from torchweft.wire.messages import TABLES, Kind, decode_ints, decode_tables, encode_tables
from torchweft.worker.agent import Agent
from torchweft.worker.peers import Peer, Place

_CLOSE_LIMIT_S = 5.0


class TensorMessage:
    """The tensors of a message with tables, as received.

    Attributes:
        table: Describes the tensors.
        buffers: The memory of the tensors that has arrived; tensors where it is on a device.
        channel_table: The channels of the missing buffers; empty once all have arrived.
    """

    __slots__ = ("_entries", "_tensor_limit", "_worker", "buffers", "channel_table", "table")

    def __init__(
        self,
        table: Buffer,
        channel_table: Buffer,
        buffers: Sequence[Buffer],
        worker: str,
        tensor_limit: int,
    ) -> None:
        self.table, self.channel_table = table, channel_table
        self.buffers: Sequence[Received] = buffers
        self._worker = worker
        self._tensor_limit = tensor_limit
        self._entries: list[Entry] | None = None

    @property
    def entries(self) -> list[Entry]:
        """The descriptions of its tensors.

        Raises:
            ProtocolError: The message is malformed.
            SerializationError: It has more tensors than this worker accepts.
        """
        if self._entries is None:
            self._entries = read(self.table, worker=self._worker, limit=self._tensor_limit)
        return self._entries

    def tensors(self) -> tuple[list[Tensor], bytes]:
        """Returns the tensors without grad, each with memory of its own, and their flags."""
        return rebuild(self.entries, self.buffers, self._worker)


class LocalMessage(NamedTuple):
    """A message from a worker to itself, in place of a frame's control part.

    Attributes:
        head: The head of the message.
        payload: The value without tensors and references.
        tensors: The tensors themselves.
        externals: The other objects that were taken out.
        mark: The end of the GPU work that computes the tensors.
    """

    head: Any
    payload: bytes
    tensors: Sequence[Tensor]
    externals: Sequence[object]
    mark: Mark | None = None


def local_frame(kind: Kind, flags: int, number: int, message: LocalMessage) -> Frame:
    """Returns a message to this worker itself as a frame."""
    return Frame(kind, flags, number, message, ())  # type: ignore[arg-type]


class TensorMessages:
    """Encodes and decodes tensor messages for one worker.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._channels = agent.channels
        self._name = agent.info.name
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        self.on_offered: Callable[[Peer, Kind, int, Mapping[str, int]], None] | None = None
        """Called for each message some of whose tensors do not go over the link, while traced."""
        self.on_fetched: Callable[[Peer, float], None] | None = None
        """Called after tensors were fetched, or could not be, with the begin, while traced."""
        agent.timers.add(agent.channels.tick)
        agent.receiver.on(Kind.PULLED, _on_pulled, inline=True)
        agent.receiver.on(Kind.SUPPLY, self._on_supply, inline=True)

    def peer_lost(self, peer: Peer) -> None:
        """Fails the waits for tensors of a lost worker; takes back memory lent to it."""
        peer.held.close()
        self._channels.lost(peer)

    def peer_disconnected(self, peer: Peer) -> None:
        """Fails the waits for tensors of a worker whose connection has ended."""
        self._channels.lost(peer)

    def close(self, limit_s: float = _CLOSE_LIMIT_S) -> None:
        """Sends waiting data, for at most ``limit_s``; ends the threads that move tensors."""
        self._channels.close(limit_s)

    def encode(
        self,
        peer: Peer,
        kind: Kind,
        flags: int,
        number: int,
        front: bytes,
        tensors: Sequence[Tensor],
        place: Place | None = None,
    ) -> list[Buffer]:
        """Returns a message with tables for ``Sender.send``.

        Tensors that the receiver fetches are kept until it has them.

        Args:
            peer: The receiver, another worker.
            kind: The kind of the message.
            flags: Flags of that kind; ``TABLES`` is added.
            number: The call that the message belongs to, or 0.
            front: The message without its tensors.
            tensors: The tensors taken out of the value, in order.
            place: Returns the receiver's device for a tensor's device; None for the same name.
        """
        if len(tensors) > self._tensor_limit:
            raise too_many(self._tensor_limit)
        table, buffers = describe(tensors, place)
        parcel = self._channels.put(peer, buffers)
        try:
            control = b"".join((front, encode_tables(table, parcel.table())))
            frame = encode_frame(kind, flags | TABLES, number, control, parcel.following)
        except BaseException:
            parcel.take_back()
            raise
        if parcel.taken:
            # Last: no tensor may begin to arrive of a message that cannot be sent after all.
            parcel.begin(may_wait=kind == Kind.REPLY)
            self._note_offered(peer, kind, number, parcel)
        return frame

    def _note_offered(self, peer: Peer, kind: Kind, number: int, parcel: Parcel) -> None:
        moved, agent = peer.moved, self._agent
        for channel, handles in parcel.taken:
            for handle in handles:
                if handle.is_shared:
                    moved["lent"] += handle.size_bytes
                    agent.lent_bytes += handle.size_bytes
                else:
                    moved[channel.counted_as] += handle.size_bytes
                    agent.offered_bytes += handle.size_bytes
        if self.on_offered is not None:
            self.on_offered(peer, kind, number, parcel.moved())

    def read(self, frame: Frame) -> TensorMessage:
        """Decodes the tables of a received message, without fetching tensors.

        Raises:
            ProtocolError: The message is malformed.
        """
        table, channel_table = decode_tables(frame.control)
        return TensorMessage(table, channel_table, frame.buffers, self._name, self._tensor_limit)

    def fetch(self, peer: Peer, message: TensorMessage) -> None:
        """Fetches tensors that did not come with the message. May block; not for reading threads.

        Raises:
            ProtocolError: The message is malformed.
            SerializationError: It has more tensors than this worker accepts.
            WorkerLost: The sender was lost before its tensors could be fetched.
        """
        name = self._name
        if message.channel_table:
            try:
                entries = message.entries
            except WeftError:
                self.discard(peer, message)
                raise
            began_s = time.monotonic()
            try:
                message.buffers = self._channels.get(
                    peer,
                    message.channel_table,
                    message.buffers,
                    lambda: devices_of(entries, name),
                )
            finally:
                if self.on_fetched is not None:
                    self.on_fetched(peer, began_s)
            message.channel_table = b""
        if any(entry.flags & ON_DEVICE for entry in message.entries) and not all(
            isinstance(buffer, Tensor) for buffer in message.buffers
        ):
            devices = devices_of(message.entries, name)
            message.buffers = self._channels.upload(peer, message.buffers, devices)

    def discard(self, peer: Peer, message: TensorMessage) -> None:
        """Tells the sender to release the tensors of a message that will not be read."""
        if message.channel_table:
            self._channels.drop(peer, message.channel_table, message.buffers)

    def _on_supply(self, peer: Peer, frame: Frame) -> None:
        """Sends, behind a message, buffers that did not reach the peer over their channel.

        Inline, unless that may block: the request must not wait for a free thread.
        """
        numbers = decode_ints(frame.control)
        if len(numbers) != 3:
            raise ProtocolError(f"a request to send again has {len(numbers)} numbers")
        token, channel, is_lasting = numbers
        supplied = self._channels.supply(peer, token, channel, is_lasting=bool(is_lasting))
        if callable(supplied):
            self._agent.reactor.submit(partial(self._supply_slowly, supplied), peer, frame.id)
        else:
            self._supply(peer, frame.id, supplied)

    def _supply_slowly(
        self, supplied: Callable[[], list[memoryview]], peer: Peer, number: int
    ) -> None:
        buffers: list[memoryview] = []
        try:
            buffers = supplied()
        finally:
            # Without buffers, the peer raises an error in place of the value.
            self._supply(peer, number, buffers)

    def _supply(self, peer: Peer, number: int, buffers: Sequence[memoryview]) -> None:
        self._agent.sender.post(peer, encode_frame(Kind.REPLY, 0, number, b"", buffers))


def _on_pulled(peer: Peer, frame: Frame) -> None:
    peer.held.release(int.from_bytes(frame.control[:8], "little"))
