"""The buffers of a message: the sender assigns each to a channel, the receiver puts all in order.

The sender keeps the buffers that will be pulled. The receiver pulls them, because they do not
follow the message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torchweft.channel.choice import STREAM, Channels
from torchweft.channel.cma import address_of
from torchweft.channel.copying import Copier
from torchweft.channel.cuda import Offered
from torchweft.channel.memory import BufferPool
from torchweft.channel.shm.pool import Lender
from torchweft.channel.slabs import Staged
from torchweft.channel.table import (
    CMA,
    FETCHED,
    RDMA,
    SHM,
    STRIPED,
    BufferEntry,
    BufferTable,
    ChannelKind,
    SharedHandle,
    encode_table,
)
from torchweft.free_threading import shared_count

Buffer = TypeVar("Buffer")
Held = memoryview | Offered | Staged
"""Memory of the host, of a device, or of a slab."""
Stage = Callable[[memoryview], Staged | None]
"""Copies a buffer to a slab that the peer can read; returns None if it cannot now."""


class HeldStatistics(NamedTuple):
    """The buffers that a peer has not pulled yet."""

    message_count: int
    size_bytes: int


class HeldTensors:
    """Keeps the memory that one peer is going to pull, until the peer reports that it has.

    Nothing is copied: writing to the memory before the pull changes the data that the peer gets, as
    with any send that has not completed. Thread-safe.
    """

    def __init__(self) -> None:
        self._tokens = shared_count(1)
        self._lock = threading.RLock()
        self._held: dict[int, Sequence[Held]] = {}
        self._size_bytes = 0
        self._is_closed = False

    def hold(self, buffers: Sequence[Held]) -> int:
        """Keeps ``buffers``, which may be empty; returns the token that ``release`` takes."""
        token = next(self._tokens)
        if not buffers:
            return token
        size_bytes = _size(buffers)
        with self._lock:
            if not self._is_closed:
                self._held[token] = buffers
                self._size_bytes += size_bytes
        return token

    def release(self, token: int) -> Sequence[Held] | None:
        """Releases the buffers of ``token`` and returns them; None if they were released already.

        A peer that failed to pull is sent the returned buffers another way.
        """
        with self._lock:
            buffers = self._held.pop(token, None)
            if buffers is not None:
                self._size_bytes -= _size(buffers)
        return buffers

    def close(self) -> None:
        """Releases everything, now and in future: the peer will pull no more."""
        with self._lock:
            self._is_closed = True
            # Drop them outside the lock: the end of a tensor may run any code.
            dropped, self._held = self._held, {}
            self._size_bytes = 0
        dropped.clear()

    def statistics(self) -> HeldStatistics:
        """Returns how much is held now."""
        with self._lock:
            return HeldStatistics(len(self._held), self._size_bytes)


def _size(buffers: Sequence[Held]) -> int:
    return sum([buffer.nbytes for buffer in buffers])


class Prepared(NamedTuple):
    """A message's buffers, each assigned to a channel.

    Attributes:
        table: The buffer table for the control part; empty if all buffers follow.
        following: The buffers that are to follow the control part.
        striped: The buffers that are to be sent over data connections, in order.
        token: Identifies the message when its buffers are reported on; 0 without table.
        lent: The buffers that are in shared memory.
        shared_bytes: The bytes of those of them that the user shares, which were not copied.
        staged_bytes: The bytes that are in slabs.
    """

    table: bytes
    following: Sequence[memoryview]
    striped: Sequence[memoryview] = ()
    token: int = 0
    lent: Sequence[BufferEntry] = ()
    shared_bytes: int = 0
    staged_bytes: int = 0

    def take_back(self, channels: Channels, held: HeldTensors) -> None:
        """Releases the buffers of a message that will not be sent: the peer will not fetch them."""
        held.release(self.token)
        lender = channels.lender
        if lender is not None:
            for entry in self.lent:
                lender.take_back(entry)


def no_slab(buffer: memoryview) -> Staged | None:
    """Returns None: there is no way by slabs."""
    return None


def prepare(
    buffers: Sequence[memoryview],
    channels: Channels,
    held: HeldTensors,
    copier: Copier,
    reach_data: Callable[[], bool] = lambda: False,
    stage: Stage = no_slab,
) -> Prepared:
    """Chooses a channel for every buffer of a message, and copies ``SHM`` buffers to shared memory.

    Args:
        buffers: Contiguous memory, in the order of the message's tensors.
        channels: The channels to the peer.
        held: Keeps the buffers that the peer will pull.
        copier: Copies into shared memory.
        reach_data: Ensures data connections for striped buffers, and returns whether there are any;
            may block.
        stage: Copies ``RDMA`` buffers to slabs.
    """
    if not buffers:
        return Prepared(b"", buffers)
    if len(buffers) == 1:
        prepared = _prepare_one(buffers[0], channels, held, copier)
        if prepared is not None:
            return prepared
    kinds = _kinds_of(buffers, channels)
    lender = channels.lender
    if FETCHED.isdisjoint(kinds) and (lender is None or not lender.has_shared):
        return Prepared(b"", buffers)
    placed = _place(buffers, kinds, channels, copier, reach_data, stage)
    token = held.hold([*placed.staged, *_of_kind(CMA, placed.entries, buffers)])
    handles = [handle for staged in placed.staged for handle in staged.handles]
    return _prepared(token, placed.entries, buffers, placed, handles)


def prepare_offered(
    buffers: Sequence[Held],
    handles: Sequence[SharedHandle],
    channels: Channels,
    held: HeldTensors,
    copier: Copier,
    reach_data: Callable[[], bool] = lambda: False,
) -> Prepared:
    """Does the same for a message with device memory, which the peer copies by itself.

    The peer reports once on the message, when it has that memory. So none of the host's memory in
    the message is pulled, or read out of slabs.

    Args:
        buffers: The memory of the message's tensors, in order.
        handles: The handles that the peer needs and may not have.
        channels: The channels to the peer.
        held: Keeps the device memory.
        copier: Copies into shared memory.
        reach_data: As for ``prepare``.
    """
    on_host = [each for each in buffers if isinstance(each, memoryview)]
    kinds = _kinds_of(on_host, channels)
    placed = _place(on_host, kinds, channels, copier, reach_data, excluded=(CMA, RDMA))
    rest = iter(placed.entries)
    entries = [each.entry if isinstance(each, Offered) else next(rest) for each in buffers]
    token = held.hold([each for each in buffers if isinstance(each, Offered)])
    return _prepared(token, entries, buffers, placed, handles)


class _Placed(NamedTuple):
    """The entries of the host's buffers, and which of them are lent or in slabs.

    ``shared_bytes`` of those that are lent are not copied.
    """

    entries: list[BufferEntry]
    lent: list[BufferEntry]
    shared_bytes: int
    staged: list[Staged]


def _kinds_of(buffers: Sequence[memoryview], channels: Channels) -> list[ChannelKind]:
    kinds = [channels.channel_for(buffer.nbytes) for buffer in buffers]
    if len(buffers) > 1 and kinds.count(STREAM) > 1:
        return _stripe_together(kinds, buffers, channels)
    return kinds


def _without(
    unwanted: ChannelKind,
    kinds: Sequence[ChannelKind],
    buffers: Sequence[memoryview],
    channels: Channels,
) -> list[ChannelKind]:
    return [
        channels.next_best(kind, buffer.nbytes) if kind == unwanted else kind
        for kind, buffer in zip(kinds, buffers, strict=True)
    ]


def _place(
    buffers: Sequence[memoryview],
    kinds: list[ChannelKind],
    channels: Channels,
    copier: Copier,
    reach_data: Callable[[], bool],
    stage: Stage = no_slab,
    excluded: tuple[ChannelKind, ...] = (),
) -> _Placed:
    """Gives buffers the channels chosen for them, or the next best where one has no room.

    Channels that are ``excluded`` are passed over.
    """
    lender = channels.lender
    lent: list[BufferEntry | None] = [None] * len(buffers)
    shared_bytes = 0
    if lender is not None:
        shared_bytes, lent = _lend(lender, kinds, buffers, copier)
    kinds = [
        channels.next_best(SHM, buffer.nbytes) if kind == SHM and entry is None else kind
        for kind, entry, buffer in zip(kinds, lent, buffers, strict=True)
    ]
    if RDMA in kinds:
        excluded = (*excluded, CMA)  # The peer reports once on what is held.
    for kind in excluded:
        kinds = _without(kind, kinds, buffers, channels)
    staged: list[Staged | None] = [None] * len(buffers)
    if RDMA in kinds:
        staged = [
            stage(buffer) if kind == RDMA and entry is None else None
            for kind, entry, buffer in zip(kinds, lent, buffers, strict=True)
        ]
        kinds = [
            channels.next_best(RDMA, buffer.nbytes) if kind == RDMA and copy is None else kind
            for kind, copy, buffer in zip(kinds, staged, buffers, strict=True)
        ]
    if STRIPED in kinds and not reach_data():
        kinds = [STREAM if kind == STRIPED else kind for kind in kinds]
    entries = [
        entry or (copy.entry if copy is not None else _entry(kind, buffer))
        for entry, copy, kind, buffer in zip(lent, staged, kinds, buffers, strict=True)
    ]
    return _Placed(
        entries,
        [entry for entry in lent if entry is not None],
        shared_bytes,
        [copy for copy in staged if copy is not None],
    )


def _prepared(
    token: int,
    entries: Sequence[BufferEntry],
    buffers: Sequence[Held],
    placed: _Placed,
    handles: Sequence[SharedHandle] = (),
) -> Prepared:
    following: list[memoryview] = []
    striped: list[memoryview] = []
    for entry, buffer in zip(entries, buffers, strict=True):
        if not isinstance(buffer, memoryview):
            continue
        if entry.kind == STRIPED:
            striped.append(buffer)
        elif entry.kind not in FETCHED:
            following.append(buffer)
    table = encode_table(token, entries, handles)
    staged_bytes = _size(placed.staged)
    return Prepared(
        table, following, striped, token, placed.lent, placed.shared_bytes, staged_bytes
    )


def _prepare_one(
    buffer: memoryview, channels: Channels, held: HeldTensors, copier: Copier
) -> Prepared | None:
    """Does the same for the usual message, one tensor that follows or is in shared memory."""
    kind, lender = channels.channel_for(buffer.nbytes), channels.lender
    entry, shared_bytes = None, 0
    if lender is not None:
        if lender.has_shared:
            entry = lender.pass_on(buffer)
            shared_bytes = 0 if entry is None else buffer.nbytes
        if entry is None and kind == SHM:
            entry = lender.put(buffer, copier)
    if entry is not None:
        token = held.hold(())
        return Prepared(encode_table(token, (entry,)), (), (), token, (entry,), shared_bytes)
    return None if kind in FETCHED else Prepared(b"", (buffer,))


def _stripe_together(
    kinds: list[ChannelKind], buffers: Sequence[memoryview], channels: Channels
) -> list[ChannelKind]:
    """Stripes tensors that are large together, as single large tensors are.

    Following the message, they would delay later messages just as long.
    """
    sizes = [buffer.nbytes for kind, buffer in zip(kinds, buffers, strict=True) if kind == STREAM]
    total_bytes = sum(sizes)
    if STRIPED not in (channels.channel_for(total_bytes), channels.next_best(RDMA, total_bytes)):
        return kinds
    return [STRIPED if kind == STREAM else kind for kind in kinds]


def _lend(
    lender: Lender, kinds: Sequence[ChannelKind], buffers: Sequence[memoryview], copier: Copier
) -> tuple[int, list[BufferEntry | None]]:
    """Lends buffers that the user shares, and copies ``SHM`` buffers into slabs if they fit.

    Returns:
        The bytes of the former, and the entries.
    """
    entries: list[BufferEntry | None] = []
    shared_bytes = 0
    try:
        for kind, buffer in zip(kinds, buffers, strict=True):
            entry = lender.pass_on(buffer)
            if entry is not None:
                shared_bytes += buffer.nbytes
            elif kind == SHM:
                entry = lender.put(buffer, copier)
            entries.append(entry)
    except BaseException:
        for entry in filter(None, entries):
            lender.take_back(entry)
        raise
    return shared_bytes, entries


def _entry(kind: ChannelKind, buffer: memoryview) -> BufferEntry:
    return BufferEntry(kind, buffer.nbytes, address_of(buffer) if kind == CMA else 0)


def _of_kind(
    kind: ChannelKind, entries: Sequence[BufferEntry], buffers: Sequence[memoryview]
) -> list[memoryview]:
    return [buffer for entry, buffer in zip(entries, buffers, strict=True) if entry.kind == kind]


def pull_buffers(
    table: BufferTable, channels: Channels, pool: BufferPool, copier: Copier
) -> list[memoryview]:
    """Pulls the ``CMA`` buffers of a table into leased memory.

    Blocks for as long as the copies take. On success the caller tells the sender the table's token.
    On failure it asks the sender, with the same token, to send these buffers another way.

    Args:
        table: The sender's buffer table.
        channels: The channels to and from the sender; they know its process, proven at connect.
        pool: Leases the memory.
        copier: Does the copies.

    Raises:
        PullError: The sender's memory cannot, or can no longer, be read.
        ProtocolError: The sender uses ``CMA`` although it was told that it cannot be pulled from.
    """
    entries = table.of_kind(CMA)
    if not entries:
        return []
    pid = channels.source_pid()
    pulled = []
    for entry in entries:
        buffer = pool.lease(entry.size_bytes)
        copier.pull(pid, entry.place, buffer)
        pulled.append(buffer)
    return pulled


def in_order(
    table: BufferTable,
    following: Sequence[Buffer],
    fetched: Mapping[ChannelKind, Sequence[Buffer]],
) -> Sequence[Buffer]:
    """Returns the following and the fetched buffers in the message's order.

    There are as many of each kind as ``table`` says.
    """
    if not table.entries:
        return following
    rest = iter(following)
    sources = {kind: iter(buffers) for kind, buffers in fetched.items()}
    return [next(sources.get(entry.kind, rest)) for entry in table.entries]
