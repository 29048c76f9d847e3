"""The channels of one worker, the buffers of each message, and the channels of each peer.

Both sides describe themselves when they connect. Each side then tests on which channels it can
*receive* from the other, and reports the result in a verdict. A side sends on a channel once the
peer's verdict confirms it: what works in one direction may fail in the other. A channel that fails
at run time is given up for that peer and direction, with one warning.

Every buffer takes the first channel of the list that works for the peer and has room; the others
follow their message. Bytes that do not arrive over their channel are asked for behind the message
(``SUPPLY``), and later buffers take the next channel.

The table in a message's control part lists the channel of each buffer. Its layout, little-endian,
is once ``token u64 | count u32``, then for every buffer in order::

    channel u8 | size u64 | length of the handle u16 | handle

Channel 0 stands for buffers that follow the message; they have no handle. When every buffer
follows, the table is empty: the frame already lists their lengths. The token identifies the
message: with it the receiver reports that it has the buffers, or asks for some of them again.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.channel import (
    CannotGet,
    Channel,
    Entry,
    Handle,
    Home,
    Meeting,
    Received,
)
from torchweft.engine.channels.channel import Peer as ChannelPeer
from torchweft.engine.channels.cuda import CudaIpc, out_of_memory
from torchweft.engine.channels.device_copies import HostCopies, Staging, Uploads, as_tensor
from torchweft.engine.channels.pull import Pull
from torchweft.engine.channels.rdma import Rdma
from torchweft.engine.channels.shm import SharedMemory
from torchweft.engine.channels.stripes import Stripes
from torchweft.engine.codec.tensors import as_memory
from torchweft.engine.threads.reports import log_exception
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.messages import Kind, encode_ints
from torchweft.errors import ProtocolError
from torchweft.free_threading import shared_count
from torchweft.probe import Facts, read_facts

_log = logging.getLogger(__name__)

CHANNELS: tuple[type[Channel], ...] = (CudaIpc, SharedMemory, Pull, Rdma, Stripes)
"""All channels, in order of preference: a buffer takes the first one that has room for it."""

INLINE, STREAM, LENT = "inline", "stream", "lent"
"""Names for reports: small and large buffers that follow their message, and shared memory."""
UNTRIED = "no tensor has been large enough to try it"
"""The obstacle of a channel that both sides have and that a first tensor tries."""
_UNCONFIRMED = "the peer has not confirmed yet that it can receive this way"

_IS_ON_HOST = operator.attrgetter("is_cpu")
_SIZE = operator.attrgetter("size_bytes")
_FACTS = "facts"

C = TypeVar("C", bound=Channel)
Wanted = Callable[[], Mapping[int, torch.device | None]]


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


# What is sent to one peer


class Held:
    """Keeps the handles of messages to one peer until it reports that it has their buffers.

    Nothing is copied: writing to the memory before then may change the data that the peer gets, as
    with any send that has not completed. Thread-safe.

    Attributes:
        tokens: Counts the messages; ``next`` returns the token of a new one.
    """

    def __init__(self) -> None:
        self.tokens = shared_count(1)
        self._lock = threading.RLock()
        self._held: dict[int, list[tuple[Channel, Handle]]] = {}
        self._is_closed = False

    def hold(self, token: int, handles: list[tuple[Channel, Handle]]) -> None:
        """Keeps the handles of a message until ``release``."""
        with self._lock:
            if not self._is_closed:
                self._held[token] = handles

    def take(self, token: int, channel: Channel) -> list[Handle]:
        """Removes and returns the kept handles of a message that go over one channel, in order."""
        with self._lock:
            held = self._held.get(token, [])
            taken = [handle for of, handle in held if of is channel]
            held[:] = [each for each in held if each[0] is not channel]
        return taken

    def release(self, token: int) -> None:
        """Lets go of a message; does nothing the second time."""
        with self._lock:
            released = self._held.pop(token, None)
        del released  # Outside the lock: the end of a tensor may run any code.

    def close(self) -> None:
        """Lets go of everything, now and in future: the peer will get no more."""
        with self._lock:
            self._is_closed = True
            # Dropped outside the lock: the end of a tensor may run any code.
            dropped, self._held = self._held, {}
        dropped.clear()


class Ways:
    """The channels to and from one peer. Thread-safe.

    Attributes:
        usable: The channels over which buffers are sent to the peer, best first.
        inline_limit_bytes: The largest buffer that counts as part of its message.

    Args:
        peer: Name of the peer, for the log.
        channels: All channels of this worker.
    """

    def __init__(self, peer: str, channels: Sequence[Channel] = ()) -> None:
        self._peer = peer
        self._channels = channels
        self.inline_limit_bytes = knobs.INLINE_LIMIT_BYTES.get()
        self.usable: tuple[Channel, ...] = ()
        self._receive_obstacles: dict[str, str] = {}
        self._send_obstacles = {each.name: _UNCONFIRMED for each in channels}
        self._given_up: set[str] = set()
        self._proven: set[str] = set()
        self._lock = threading.RLock()

    def sizes(self) -> list[tuple[str, int]]:
        """Returns the channels for the host's memory, best first, with their smallest buffers."""
        return [(each.name, each.from_bytes) for each in self.usable if not each.is_for_devices]

    def accepted(self, obstacles: Mapping[str, str]) -> None:
        """Records for the verdict why nothing can be received from the peer over channels."""
        self._receive_obstacles.update(obstacles)

    def verdict(self) -> dict[str, str]:
        """Returns for the peer why each channel fails here; empty if it works."""
        return dict(self._receive_obstacles)

    def confirm(self, verdict: object) -> None:
        """Applies the peer's verdict: sends from now on by the channels that work there.

        A channel missing in the verdict stays as it is; a channel unknown to this side is ignored.

        Raises:
            ProtocolError: ``verdict`` is not a verdict.
        """
        if not isinstance(verdict, dict) or not all(isinstance(v, str) for v in verdict.values()):
            raise ProtocolError(f"a peer answers {verdict!r} to what it can receive")
        with self._lock:
            for name in self._send_obstacles:
                if name not in self._given_up and name in verdict:
                    self._send_obstacles[name] = verdict[name]
            self._update()

    def prove(self, channel: Channel) -> None:
        """Records that the peer has received over a channel that a first tensor tries."""
        self._proven.add(channel.name)

    def give_up(self, name: str, reason: str) -> None:
        """Permanently stops sending to the peer over one channel, and logs that once."""
        with self._lock:
            if name in self._given_up or name not in self._send_obstacles:
                return
            self._given_up.add(name)
            self._send_obstacles[name] = reason
            is_for_devices = any(each.name == name and each.is_for_devices for each in self.usable)
            self._update()
            rest = [other for other, _ in self.sizes()] or [STREAM]
        if is_for_devices:
            rest = ["the host's memory"]
        _log.warning(
            "tensors to worker %r no longer travel by %s, but by %s: %s",
            self._peer,
            name,
            " or ".join(rest),
            reason,
        )

    def obstacles(self) -> dict[str, str]:
        """Returns for every channel why it is not used for sending; empty if it is."""
        untried = [each.name for each in self.usable if each.is_tried]
        untried = [name for name in untried if name not in self._proven]
        return {INLINE: "", STREAM: ""} | self._send_obstacles | dict.fromkeys(untried, UNTRIED)

    def _update(self) -> None:
        # One assignment, so that senders need no lock.
        self.usable = tuple(
            [each for each in self._channels if not self._send_obstacles[each.name]]
        )


class Peer(ChannelPeer, Protocol):
    """The other worker, as ``Channels`` knows it."""

    ways: Ways
    held: Held
    moved: Counter[str]


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

    def moved(self) -> dict[str, int]:
        """Returns the bytes that do not go over the link, by ``"sent shm"`` and the like."""
        found: dict[str, int] = {}
        for channel, handles in self.taken:
            for handle in handles:
                name = LENT if handle.is_shared else channel.counted_as
                found[name] = found.get(name, 0) + handle.size_bytes
        return found


class Channels:
    """All channels of one worker. Thread-safe.

    Attributes:
        pulled_bytes: Size of all buffers that were got.
        on_pulled: Called with peer, channel and bytes after buffers have been got, while traced.

    Args:
        home: What channels need of the worker.
        ask_again: Has a peer send the buffers of a message behind it; called with the peer, the
            control part of the request, and the reason. Blocks.
    """

    def __init__(
        self, home: Home, ask_again: Callable[[Any, bytes, Exception], Sequence[Buffer]]
    ) -> None:
        self._home = home
        self._ask_again = ask_again
        self.all = tuple([channel(home) for channel in CHANNELS])
        self._by_number = {channel.number: channel for channel in self.all}
        self._here = read_facts()
        self._told = {channel.name: channel.describe() for channel in self.all}
        self._staging = Staging(home.page_locks)
        self._uploads = Uploads(home.pool, home.page_locks)
        self._small_bytes = knobs.SMALL_ON_DEVICE_BYTES.get()
        self._limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        self._next_trim_s = 0.0
        self.pulled_bytes = 0
        self.on_pulled: Callable[[Any, str, int], None] | None = None

    def of(self, channel: type[C]) -> C:
        """Returns the channel of a type."""
        found = self._by_number[channel.number]
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
            peer.ways = Ways(peer.name, self.all)
            peer.ways.accepted(
                {
                    channel.name: channel.accept(
                        peer,
                        Meeting(self._here, facts, by_name[channel.name], connection, descriptor),
                    )
                    for channel in self.all
                }
            )
        finally:
            close_all(descriptors)

    def take(self, peer: Peer, connection: socket.socket, number: int) -> None:
        """Takes a connection that a peer has dialled for one of the channels.

        Raises:
            OSError: The peer is lost, or this worker has shut down.
        """
        if not any(channel.take(peer, connection, number) for channel in self.all):
            raise ConnectionAbortedError("no channel takes connections")

    # Sending

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

    def supply(self, peer: Peer, token: int, number: int, *, is_lasting: bool) -> list[Handle]:
        """Returns the handles of buffers that did not reach a peer over a channel.

        Args:
            peer: The peer.
            token: The message.
            number: The channel.
            is_lasting: Whether the peer cannot receive over the channel any more.

        Raises:
            ProtocolError: There is no such channel.
        """
        channel = self._by_number.get(number)
        if channel is None:
            raise ProtocolError(f"a peer asks for tensors of channel {number}")
        if is_lasting:
            reason = f"worker {peer.name!r} cannot get tensors of this process that way"
            peer.ways.give_up(channel.name, reason)
        return peer.held.take(token, channel)

    # Receiving

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
        first = self._by_number.get(entries[0].channel) if len(entries) == 1 else None
        if first is not None and not first.is_held:
            # The usual message, one tensor in shared memory: what follows takes 5 us.
            return self._get(peer, first, token, entries)
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
            supplied = self._ask_again(peer, request, error)
            if [len(buffer) for buffer in supplied] != [entry.size_bytes for entry in entries]:
                raise ProtocolError(
                    f"worker {peer.name!r} could not resend tensors that did not come: {error}"
                ) from None
            return supplied
        size_bytes = sum(map(_SIZE, entries))
        self.pulled_bytes += size_bytes
        peer.moved[f"received {channel.name}"] += size_bytes
        if self.on_pulled is not None:
            self.on_pulled(peer, channel.name, size_bytes)
        return buffers

    def drop(self, peer: Peer, table: Buffer, following: Sequence[Received]) -> None:
        """Tells the sender to release the buffers of a message that will not be read.

        Raises:
            ProtocolError: The table is malformed.
        """
        token, entries = decode_table(table, list(map(len, following)), self._limit_bytes)
        waiting = self._by_channel(peer, entries)
        self._drop(peer, token, waiting, any(channel.is_held for channel in waiting))

    def upload(
        self, peer: Peer, buffers: Sequence[Received], devices: Mapping[int, torch.device | None]
    ) -> list[Received]:
        """Copies the host's memory that belongs on GPUs there; returns all buffers. Blocks.

        Args:
            peer: The sender.
            buffers: The memory of its message.
            devices: The device of each buffer by its place.

        Raises:
            torch.OutOfMemoryError: A device has too little memory.
        """
        wanted = {
            place: (memoryview(buffer), device)
            for place, buffer in enumerate(buffers)
            if (device := devices.get(place)) is not None
            and device.type == "cuda"
            and not isinstance(buffer, Tensor)
        }
        memories = [memory for memory, _ in wanted.values()]
        try:
            copies = self._uploads.to_devices(memories, [device for _, device in wanted.values()])
        except torch.OutOfMemoryError as error:
            size_bytes = sum([memory.nbytes for memory in memories])
            raise out_of_memory(self._home.name, peer, size_bytes, error) from None
        found = dict(zip(wanted, copies, strict=True))
        return [found.get(place, buffer) for place, buffer in enumerate(buffers)]

    def _by_channel(self, peer: Peer, entries: Sequence[Entry]) -> dict[Channel, dict[int, Entry]]:
        """Returns the buffers to get over each channel, by their positions."""
        found: dict[Channel, dict[int, Entry]] = {}
        for position, entry in enumerate(entries):
            if entry.channel != FOLLOWS:
                channel = self._by_number.get(entry.channel)
                if channel is None:
                    raise ProtocolError(
                        f"worker {peer.name!r} sends by channel {entry.channel}, which this "
                        "version does not have"
                    )
                found.setdefault(channel, {})[position] = entry
        return found

    def _drop(
        self, peer: Peer, token: int, waiting: Mapping[Channel, dict[int, Entry]], is_held: bool
    ) -> None:
        """Drops the buffers that are left; reports that the message needs no handles any more."""
        for channel, own in waiting.items():
            channel.drop(peer, token, list(own.values()))
        if is_held:
            self._home.post(peer, Kind.PULLED, encode_ints(token))

    # Housekeeping

    def tick(self, now_s: float) -> float:
        """Frees memory that has not been used for a while; a timer job. Returns its next time."""
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + self._home.idle_s / 2
            self._each(lambda channel: channel.tick(now_s))
            self._home.pool.trim(self._home.idle_s)
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
        self._home.copier.close()

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
