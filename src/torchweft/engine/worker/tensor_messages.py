"""Messages whose tensors do not stand in the frame, and those of a worker to itself.

The layers above give the front of a message and the tensors that were taken out of its value. This
module writes the table of the tensors and has the channels take the buffers; the receiver reverses
both. Small tensors stand in the message itself instead; see ``codec.tensors``. A message from a
worker to itself touches neither bytes nor channels: its tensors arrive by reference.
"""

from __future__ import annotations

import time
from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft import knobs
from torchweft.engine.channels.channel import Received
from torchweft.engine.channels.channels import LENT
from torchweft.engine.codec.objects import Packed
from torchweft.engine.codec.tensors import (
    ON_DEVICE,
    Entry,
    describe,
    devices_of,
    read,
    rebuild,
    too_many,
)
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.interrupts import call
from torchweft.engine.threads.thread_modes import MODES, plain_operations
from torchweft.engine.wire.frames import HEADER_BYTES, Buffer, Frame, encode_frame
from torchweft.engine.wire.messages import (
    TABLES,
    CallHead,
    HandedReference,
    Kind,
    decode_ints,
    decode_tables,
    encode_reply,
    encode_tables,
)
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.peers import Peer, Place
from torchweft.errors import ProtocolError, WeftError

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
            control = b"".join((front, encode_tables(table, parcel.table)))
            frame = encode_frame(kind, flags | TABLES, number, control, parcel.following)
        except BaseException:
            parcel.take_back()
            raise
        if parcel.taken:
            # Last: no tensor may begin to arrive of a message that cannot be sent after all.
            parcel.begin(may_wait=kind == Kind.REPLY)
            moved = parcel.moved()
            lent_bytes = moved.get(LENT, 0)
            self._agent.lent_bytes += lent_bytes
            self._agent.offered_bytes += sum(moved.values()) - lent_bytes
            for name, size_bytes in moved.items():
                peer.moved[name] += size_bytes
            if self.on_offered is not None:
                self.on_offered(peer, kind, number, moved)
        return frame

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
        handles = self._channels.supply(peer, token, channel, is_lasting=bool(is_lasting))

        def supply(*_: object) -> None:
            buffers: list[memoryview] = []
            try:
                buffers = [handle.memory() for handle in handles]
            finally:
                # Without buffers, the peer raises an error in place of the value.
                answer = encode_frame(Kind.REPLY, 0, frame.id, b"", buffers)
                self._agent.sender.post(peer, answer)

        if any(handle.is_slow for handle in handles):
            self._agent.reactor.submit(supply)
        else:
            supply()


def _on_pulled(peer: Peer, frame: Frame) -> None:
    peer.held.release(int.from_bytes(frame.control[:8], "little"))


# Requests and replies


class Apart:
    """The tensors of a request that do not stand in its frame, or its value for this worker itself.

    Args:
        tensor_messages: Encodes the tensors.
        peer: The receiver.
        head: The head of a call to oneself.
        packed: The value.
    """

    def __init__(
        self, tensor_messages: TensorMessages, peer: Peer, head: CallHead, packed: Packed
    ) -> None:
        self._tensor_messages = tensor_messages
        self._head = head
        self._packed = packed
        self._maker, self._mark = 0, None
        if device_streams.HAS_CUDA and (peer.link is None or peer.unsent):
            # It is encoded in another thread at the first contact, or not at all, as for oneself.
            self._maker = get_ident()
            self._mark = mark_of(packed.tensors)

    def message(
        self, peer: Peer, kind: Kind, flags: int, number: int, frame: bytearray
    ) -> Outgoing:
        """Returns the message to send; see ``Request``."""
        if any(map(call, MODES)):
            with plain_operations():
                return self.message(peer, kind, flags, number, frame)
        packed = self._packed
        if self._mark is not None and self._maker != get_ident():
            device_streams.use(self._mark, packed.tensors)
        if peer.is_self:
            return local_frame(kind, flags, number, LocalMessage(self._head, *packed, self._mark))
        maps = peer.device_maps
        place = None if maps.is_identity else maps.forward
        control = bytes(memoryview(frame)[HEADER_BYTES:])
        return self._tensor_messages.encode(
            peer, kind, flags, number, control, packed.tensors, place
        )


def mark_of(tensors: Sequence[Tensor]) -> Mark | None:
    """Returns a mark of the work that computes some of the tensors, if any are on a GPU."""
    if device_streams.HAS_CUDA and any(tensor.is_cuda for tensor in tensors):
        return device_streams.mark()
    return None


def reply_by_tables(
    tensor_messages: TensorMessages,
    peer: Peer,
    number: int,
    context_id: int,
    message_id: int,
    packed: Packed,
    handed: Sequence[HandedReference],
) -> Outgoing:
    """Returns an answer whose tensors are described by tables, or that goes to this worker."""
    maps = peer.device_maps
    if peer.is_self:
        if not maps.is_identity:
            maps.check(packed.tensors, is_back=True)
        head = context_id, message_id, (), 0, 0
        local = LocalMessage(head, *packed, mark_of(packed.tensors))
        return local_frame(Kind.REPLY, 0, number, local)
    front = encode_reply(context_id, message_id, handed, packed.payload)
    place = None if maps.is_identity else maps.back
    return tensor_messages.encode(peer, Kind.REPLY, 0, number, front, packed.tensors, place)


def own_copy(
    tensor: Tensor,
    context_id: int,
    keeps_graphs: bool = False,
    device: torch.device | None = None,
) -> Tensor:
    """Returns a copy of a tensor that a worker sends to itself, as if another had received it.

    In an autograd context (not 0) the copy stays in the graph. Outside of contexts, the copy of a
    leaf is a new leaf, and that of a computed tensor stays in the graph if ``keeps_graphs``.

    Args:
        tensor: The tensor.
        context_id: The context of the message, or 0.
        keeps_graphs: Whether graphs outside of contexts are kept.
        device: The device of the copy; None for that of the tensor.
    """
    if tensor.requires_grad and (context_id or (keeps_graphs and not tensor.is_leaf)):
        with torch.enable_grad():
            copy = tensor.clone() if device is None else tensor.to(device, copy=True)
        if isinstance(tensor, Parameter):
            copy._is_param = True  # for isinstance
        return copy
    copy = tensor.detach()
    copy = copy.clone() if device is None else copy.to(device, copy=True)
    if isinstance(tensor, Parameter):
        return Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)
