"""Messages whose tensors do not stand in the frame, and those of a worker to itself.

The layers above give the front of a message and the tensors that were taken out of its value. This
module writes the table of the tensors and has the channels take the buffers, the memory of the
tensors; the receiver reverses both. Small tensors stand in the message itself instead; see
``codec.tensors``. A message from a worker to itself touches neither bytes nor channels: its tensors
arrive by reference.

Every buffer takes the first channel of the list that works for the peer and has room; the others
follow their message. Bytes that do not arrive over their channel are asked for behind the message
(``SUPPLY``), and later buffers take the next channel.

The table of buffers lists the channel of each one. Its layout, little-endian, is once ``token u64 |
count u32``, then for every buffer in order::

    channel u8 | size u64 | length of the handle u16 | handle

Channel 0 stands for buffers that follow the message; they have no handle. When every buffer
follows, the table is empty: the frame already lists their lengths. The token identifies the
message: with it the receiver reports that it has the buffers, or asks for some of them again.
"""

from __future__ import annotations

import operator
import struct
import time
from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from torchweft import knobs
from torchweft.engine.channels.channel import LENT, CannotGet, Channel, Entry, Handle, Received
from torchweft.engine.channels.cuda import out_of_memory
from torchweft.engine.channels.device_copies import HostCopies, Staging, Uploads, as_tensor
from torchweft.engine.codec import tensors as codec
from torchweft.engine.codec.objects import Packed
from torchweft.engine.codec.tensors import (
    ON_DEVICE,
    as_memory,
    describe,
    devices_of,
    read,
    rebuild,
    too_many,
)
from torchweft.engine.protocol.sessions import Outgoing
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.engine.threads.thread_modes import has_modes, plain_operations
from torchweft.engine.wire.frames import HEADER_BYTES, Buffer, Frame, encode_frame
from torchweft.engine.wire.messages import (
    TABLES,
    CallHead,
    HandedReference,
    Kind,
    decode_ints,
    decode_tables,
    encode_ints,
    encode_reply,
    encode_tables,
)
from torchweft.engine.worker.agent import Agent
from torchweft.engine.worker.peers import Peer, Place
from torchweft.errors import ProtocolError, WeftError

_IS_ON_HOST = operator.attrgetter("is_cpu")
_SIZE = operator.attrgetter("size_bytes")
Wanted = Callable[[], Mapping[int, torch.device | None]]

_CLOSE_LIMIT_S = 5.0


# The table

FOLLOWS = 0
"""Stands in place of a channel for buffers that follow the message."""

_HEAD = struct.Struct("<QI")
_ENTRY = struct.Struct("<BQH")
_HEAD_BYTES, _ENTRY_BYTES = _HEAD.size, _ENTRY.size


class BufferTable(NamedTuple):
    """The buffers of one message; no entries if all of them follow."""

    token: int
    entries: Sequence[Entry]


EMPTY_TABLE = BufferTable(0, ())


def encode_table(
    token: int, entries: Sequence[tuple[int, int, bytes, torch.device | None]]
) -> bytes:
    """Returns the table as bytes; empty if every buffer follows.

    Args:
        token: Identifies the message.
        entries: The buffers, in order, with the fields of ``Entry``.
    """
    parts, is_needed = [_HEAD.pack(token, len(entries))], False
    for channel, size_bytes, content, _ in entries:
        parts += (_ENTRY.pack(channel, size_bytes, len(content)), content)
        if channel != FOLLOWS:
            is_needed = True
    return b"".join(parts) if is_needed else b""


def decode_table(
    data: bytes | bytearray | memoryview, following_bytes: Sequence[int], limit_bytes: int
) -> BufferTable:
    """Reads a table and checks it before memory is allocated for its buffers.

    Args:
        data: The table, as ``encode_table`` returned it at the sender.
        following_bytes: Sizes of the buffers that followed the control part.
        limit_bytes: Largest sum of all buffers that is accepted.

    Raises:
        ProtocolError: The table is malformed, contradicts the buffers that arrived, or announces
            more than the limit.
    """
    if not data:
        return EMPTY_TABLE
    data, size, end = bytes(data), len(data), _HEAD_BYTES
    entries, total_bytes, following = [], 0, []
    try:
        token, count = _HEAD.unpack_from(data)
        for _ in range(count):
            channel, size_bytes, length = _ENTRY.unpack_from(data, end)
            start = end + _ENTRY_BYTES
            end = start + length
            entries.append(Entry(channel, size_bytes, data[start:end]))
            total_bytes += size_bytes
            if channel == FOLLOWS:
                following.append(size_bytes)
                if length:
                    raise ProtocolError("a buffer that follows its message has a handle")
            elif not size_bytes:
                raise ProtocolError("an empty buffer is to be fetched over a channel")
    except struct.error:
        raise ProtocolError(f"a buffer table announces more than its {size} bytes have") from None
    if end != size:
        raise ProtocolError(f"a buffer table has {size} bytes, and its entries take {end}")
    if total_bytes > limit_bytes:
        raise ProtocolError(f"a message announces {total_bytes} bytes; the limit is {limit_bytes}")
    if following != list(following_bytes):
        raise ProtocolError(
            f"a buffer table announces {len(following)} buffers behind the message; "
            f"{len(following_bytes)} of {sum(following_bytes)} bytes came"
        )
    if len(following) == count:
        raise ProtocolError("a buffer table lists no buffer to fetch; it should have been empty")
    return BufferTable(token, entries)


class Parcel:
    """The buffers of one message that is sent.

    Attributes:
        token: Identifies the message.
        buffers: The buffers, flat contiguous tensors; on the host where they were copied there.
        table: The table for the message; empty if all buffers follow.
        following: The buffers that follow the message.
        taken: The channels that carry the others, with the handles that each has made.
        copies: Copies from devices that still fill some of the buffers.

    Args:
        peer: The receiver.
        buffers: The buffers.
    """

    __slots__ = ("_entries", "_peer", "buffers", "copies", "following", "table", "taken", "token")

    def __init__(self, peer: Peer, buffers: Sequence[Tensor]) -> None:
        self._peer = peer
        self.buffers = buffers
        self._entries: list[Any] = [None] * len(buffers)
        self.token = next(peer.held.tokens)
        self.table = b""
        self.following: Sequence[memoryview] = ()
        self.taken: list[tuple[Channel, list[Handle]]] = []
        self.copies: HostCopies | None = None

    def offer(self, channel: Channel, left: Sequence[int]) -> Sequence[int]:
        """Offers buffers to a channel; returns the positions of those that it has not taken."""
        buffers = self.buffers
        if len(left) < len(buffers):
            buffers = [buffers[position] for position in left]
        handles = channel.put(self._peer, self.token, buffers)
        taken: list[Handle] = []
        rest: list[int] = []
        for position, handle in zip(left, handles, strict=False):
            if handle is None:
                rest.append(position)
            else:
                taken.append(handle)
                # A plain tuple is made in a fifth of the time of an ``Entry``.
                self._entries[position] = (channel.number, handle.size_bytes, handle.content, None)
        if not taken:
            return left
        self.taken.append((channel, taken))
        return rest

    def wait_for_copies(self) -> None:
        """Blocks until all buffers are filled."""
        copies, self.copies = self.copies, None
        if copies is not None:
            copies.wait()

    def close(self, left: Sequence[int]) -> None:
        """Has the buffers that are left follow, keeps the handles of others, writes the table."""
        if left:
            self.following = [as_memory(self.buffers[position]) for position in left]
            self.wait_for_copies()
        if not self.taken:
            return
        held = [(of, each) for of, handles in self.taken if of.is_held for each in handles]
        if held:
            self._peer.held.hold(self.token, held)
        for position, memory in zip(left, self.following, strict=True):
            self._entries[position] = (FOLLOWS, memory.nbytes, b"", None)
        self.table = encode_table(self.token, self._entries)

    def begin(self, *, may_wait: bool) -> None:
        """Has channels send bytes beside the message, which is certain to be sent.

        Args:
            may_wait: Whether to block while much is waiting for the same peer already.
        """
        peer, token, copies = self._peer, self.token, self.copies
        try:
            for channel, handles in self.taken:
                if channel.sends_apart:
                    channel.begin(peer, token, handles, may_wait=may_wait, copies=copies)
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Releases the buffers of a message that will not be sent."""
        self._peer.held.release(self.token)
        for _, handles in self.taken:
            for handle in handles:
                handle.take_back()


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
        self._entries: list[codec.Entry] | None = None

    @property
    def entries(self) -> list[codec.Entry]:
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
    """Encodes and decodes tensor messages for one worker. Thread-safe.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._channels = agent.channels
        self._name = agent.info.name
        self._staging = Staging(agent.page_locks)
        self._uploads = Uploads(agent.pool, agent.page_locks)
        self._small_bytes = knobs.SMALL_ON_DEVICE_BYTES.get()
        self._limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        self.on_offered: Callable[[Peer, Kind, int, Mapping[str, int]], None] | None = None
        """Called for each message some of whose tensors do not go over the link, while traced."""
        self.on_fetched: Callable[[Peer, float], None] | None = None
        """Called after tensors were fetched, or could not be, with the begin, while traced."""
        self.on_pulled: Callable[[Any, str, int], None] | None = None
        """Called with peer, channel and bytes after buffers have been got, while traced."""
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
        parcel = self.put(peer, buffers)
        try:
            control = b"".join((front, encode_tables(table, parcel.table)))
            frame = encode_frame(kind, flags | TABLES, number, control, parcel.following)
        except BaseException:
            parcel.take_back()
            raise
        if parcel.taken:
            # Last: no tensor may begin to arrive of a message that cannot be sent after all.
            parcel.begin(may_wait=kind == Kind.REPLY)
            moved = self.count(peer, parcel)
            if self.on_offered is not None:
                self.on_offered(peer, kind, number, moved)
        return frame

    def put(self, peer: Peer, buffers: Sequence[Tensor]) -> Parcel:
        """Assigns each buffer of a message to a channel, and lets the channels prepare it.

        Args:
            peer: The receiver.
            buffers: Flat, contiguous tensors. To be called in a thread on whose current streams the
                values of those on devices are made.
        """
        usable, parcel = peer.ways.usable, Parcel(peer, buffers)
        left: Sequence[int] = range(len(buffers))
        try:
            if not all(map(_IS_ON_HOST, buffers)):
                left = self._from_devices(parcel, usable)
            for channel in usable:
                if not left:
                    break
                if channel.is_for_devices:
                    continue
                if parcel.copies is not None and not channel.sends_apart:
                    parcel.wait_for_copies()
                left = parcel.offer(channel, left)
            parcel.close(left)
        except BaseException:
            parcel.take_back()
            raise
        return parcel

    def count(self, peer: Peer, parcel: Parcel) -> dict[str, int]:
        """Counts the bytes of a message that do not go over the link, which it returns by names."""
        found: dict[str, int] = {}
        for channel, handles in parcel.taken:
            for handle in handles:
                name = LENT if handle.is_shared else channel.counted_as
                found[name] = found.get(name, 0) + handle.size_bytes
        for name, size_bytes in found.items():
            peer.moved[name] += size_bytes
            if name == LENT:
                self._channels.lent_bytes += size_bytes
            else:
                self._channels.offered_bytes += size_bytes
        return found

    def _from_devices(self, parcel: Parcel, usable: Sequence[Channel]) -> list[int]:
        """Offers buffers to channels between devices; brings the other ones to the host.

        Returns the positions of those that no channel has taken.
        """
        buffers, memory = parcel.buffers, list(parcel.buffers)
        on_devices = [n for n, buffer in enumerate(buffers) if not _IS_ON_HOST(buffer)]
        left: Sequence[int] = on_devices
        for channel in usable:
            if channel.is_for_devices and left:
                left = parcel.offer(channel, left)
        copied = [position for position in left if buffers[position].is_cuda]
        if len(copied) == 1 and buffers[copied[0]].nbytes <= self._small_bytes:
            copied = []  # Pinned memory is no gain.
        if copied:
            parcel.copies = self._staging.begin([buffers[n] for n in copied], cut=True)
            for position, each in zip(copied, parcel.copies.memories, strict=True):
                memory[position] = as_tensor(each)
        offered = set(on_devices).difference(left)
        rest = [n for n in range(len(buffers)) if n not in offered]
        for position in set(rest).difference(copied):
            memory[position] = buffers[position].cpu()
        parcel.buffers = memory
        return rest

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
                message.buffers = self.get(
                    peer,
                    message.channel_table,
                    message.buffers,
                    lambda: devices_of(entries, name),
                )
            finally:
                if self.on_fetched is not None:
                    self.on_fetched(peer, began_s)
            message.channel_table = b""
        if any(entry.flags & ON_DEVICE for entry in message.entries):
            message.buffers = self._upload(peer, message.buffers, devices_of(message.entries, name))

    def discard(self, peer: Peer, message: TensorMessage) -> None:
        """Tells the sender to release the tensors of a message that will not be read."""
        if message.channel_table:
            table, sizes = message.channel_table, list(map(len, message.buffers))
            token, entries = decode_table(table, sizes, self._limit_bytes)
            waiting = self._by_channel(peer, entries)
            self._drop(peer, token, waiting, any(channel.is_held for channel in waiting))

    def get(
        self, peer: Peer, table: Buffer, following: Sequence[Received], wanted: Wanted
    ) -> Sequence[Received]:
        """Returns all buffers of a message, in order. May block.

        Args:
            peer: The sender.
            table: The message's table.
            following: The buffers that followed the message.
            wanted: Returns the device of each buffer's tensor here, by position.

        Raises:
            ProtocolError: The table, or a handle in it, is impossible.
            WorkerLost: The sender was lost before its buffers could be fetched.
        """
        token, entries = decode_table(table, list(map(len, following)), self._limit_bytes)
        waiting = self._by_channel(peer, entries)
        found: dict[int, Received] = {}
        is_held = any(channel.is_held for channel in waiting)
        try:
            devices = wanted() if any(channel.is_for_devices for channel in waiting) else {}
            while waiting:
                channel = next(iter(waiting))
                own = waiting.pop(channel)
                if channel.is_for_devices:
                    own = {n: each._replace(device=devices.get(n)) for n, each in own.items()}
                got = self._get(peer, channel, token, list(own.values()))
                found.update(zip(own, got, strict=True))
        finally:
            self._drop(peer, token, waiting, is_held)
        rest = iter(following)
        return [found[n] if n in found else next(rest) for n in range(len(entries))]

    def _get(
        self, peer: Peer, channel: Channel, token: int, entries: Sequence[Entry]
    ) -> Sequence[Received]:
        try:
            buffers = channel.get(peer, token, entries)
        except CannotGet as error:
            request = encode_ints(token, channel.number, int(error.is_lasting))
            supplied = self._agent.ask_again(peer, request, error)
            if [len(buffer) for buffer in supplied] != [entry.size_bytes for entry in entries]:
                raise ProtocolError(
                    f"worker {peer.name!r} could not resend tensors that did not come: {error}"
                ) from None
            return supplied
        size_bytes = sum(map(_SIZE, entries))
        self._channels.pulled_bytes += size_bytes
        peer.moved[f"received {channel.name}"] += size_bytes
        if self.on_pulled is not None:
            self.on_pulled(peer, channel.name, size_bytes)
        return buffers

    def _by_channel(self, peer: Peer, entries: Sequence[Entry]) -> dict[Channel, dict[int, Entry]]:
        """Returns the buffers to get over each channel, by their positions."""
        found: dict[Channel, dict[int, Entry]] = {}
        for position, entry in enumerate(entries):
            if entry.channel != FOLLOWS:
                channel = self._channels.by_number.get(entry.channel)
                if channel is None:
                    raise ProtocolError(
                        f"worker {peer.name!r} sends by channel {entry.channel}, which this "
                        "version does not have"
                    )
                found.setdefault(channel, {})[position] = entry
        return found

    def _drop(
        self,
        peer: Peer,
        token: int,
        waiting: Mapping[Channel, dict[int, Entry]],
        is_held: bool,
    ) -> None:
        """Drops the buffers that are left; reports that the message needs no handles any more."""
        for channel, own in waiting.items():
            channel.drop(peer, token, list(own.values()))
        if is_held:
            self._channels.home.post(peer, Kind.PULLED, encode_ints(token))

    def _upload(
        self,
        peer: Peer,
        buffers: Sequence[Received],
        devices: Mapping[int, torch.device | None],
    ) -> Sequence[Received]:
        """Copies the host's memory that belongs on GPUs there; returns all buffers. Blocks."""
        wanted = {
            place: (memoryview(buffer), device)
            for place, buffer in enumerate(buffers)
            if (device := devices.get(place)) is not None
            and device.type == "cuda"
            and not isinstance(buffer, Tensor)
        }
        if not wanted:
            return buffers
        memories = [memory for memory, _ in wanted.values()]
        try:
            copies = self._uploads.to_devices(memories, [device for _, device in wanted.values()])
        except torch.OutOfMemoryError as error:
            size_bytes = sum([memory.nbytes for memory in memories])
            raise out_of_memory(self._name, peer, size_bytes, error) from None
        found = dict(zip(wanted, copies, strict=True))
        return [found.get(place, buffer) for place, buffer in enumerate(buffers)]

    def _on_supply(self, peer: Peer, frame: Frame) -> None:
        """Sends, behind a message, buffers that did not reach the peer over their channel.

        Inline, unless that may block: the request must not wait for a free thread.
        """
        numbers = decode_ints(frame.control)
        if len(numbers) != 3:
            raise ProtocolError(f"a request to send again has {len(numbers)} numbers")
        token, number, is_lasting = numbers
        channel = self._channels.by_number.get(number)
        if channel is None:
            raise ProtocolError(f"a peer asks for tensors of channel {number}")
        if is_lasting:
            reason = f"worker {peer.name!r} cannot get tensors of this process that way"
            peer.ways.give_up(channel.name, reason)
        handles = peer.held.take(token, channel)

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
        if has_modes():
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
