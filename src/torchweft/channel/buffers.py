"""The buffers of a message: the sender assigns each to a channel, the receiver puts all in order.

The sender keeps the buffers that will be pulled. The receiver pulls them, because they do not
follow the message.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torchweft.channel.choice import STREAM, Channels
from torchweft.channel.cma import address_of
from torchweft.channel.copying import Copier
from torchweft.channel.memory import BufferPool
from torchweft.channel.shm.pool import Lender
from torchweft.channel.table import (
    CMA,
    FETCHED,
    SHM,
    STRIPED,
    BufferEntry,
    BufferTable,
    ChannelKind,
    encode_table,
)

Buffer = TypeVar("Buffer")


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
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._held: dict[int, Sequence[memoryview]] = {}
        self._size_bytes = 0
        self._is_closed = False

    def hold(self, buffers: Sequence[memoryview]) -> int:
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

    def release(self, token: int) -> Sequence[memoryview] | None:
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


def _size(buffers: Sequence[memoryview]) -> int:
    return sum([buffer.nbytes for buffer in buffers])


class Prepared(NamedTuple):
    """A message's buffers, each assigned to a channel.

    Attributes:
        table: The buffer table for the control part; empty if all buffers follow.
        following: The buffers that are to follow the control part.
        striped: The buffers that are to be sent over data connections, in order.
        token: Identifies the message when its buffers are reported on; 0 without table.
        lent: The buffers that are in shared memory.
    """

    table: bytes
    following: Sequence[memoryview]
    striped: Sequence[memoryview] = ()
    token: int = 0
    lent: Sequence[BufferEntry] = ()

    def take_back(self, channels: Channels, held: HeldTensors) -> None:
        """Releases the buffers of a message that will not be sent: the peer will not fetch them."""
        held.release(self.token)
        lender = channels.lender
        if lender is not None:
            for entry in self.lent:
                lender.take_back(entry)


def prepare(
    buffers: Sequence[memoryview],
    channels: Channels,
    held: HeldTensors,
    copier: Copier,
    reach_data: Callable[[], bool] = lambda: False,
) -> Prepared:
    """Chooses a channel for every buffer of a message, and copies ``SHM`` buffers to shared memory.

    Args:
        buffers: Contiguous memory, in the order of the message's tensors.
        channels: The channels to the peer.
        held: Keeps the buffers that the peer will pull.
        copier: Copies into shared memory.
        reach_data: Ensures data connections for striped buffers, and returns whether there are any;
            may block.
    """
    if not buffers:
        return Prepared(b"", buffers)
    if len(buffers) == 1:
        prepared = _prepare_one(buffers[0], channels, held, copier)
        if prepared is not None:
            return prepared
    kinds = [channels.channel_for(buffer.nbytes) for buffer in buffers]
    if len(buffers) > 1 and kinds.count(STREAM) > 1:
        kinds = _stripe_together(kinds, buffers, channels)
    lender = channels.lender
    if FETCHED.isdisjoint(kinds) and (lender is None or not lender.has_shared):
        return Prepared(b"", buffers)
    lent = [None] * len(buffers) if lender is None else _lend(lender, kinds, buffers, copier)
    kinds = [
        channels.next_best(SHM, buffer.nbytes) if kind == SHM and entry is None else kind
        for kind, entry, buffer in zip(kinds, lent, buffers, strict=True)
    ]
    if STRIPED in kinds and not reach_data():
        kinds = [STREAM if kind == STRIPED else kind for kind in kinds]
    entries = [
        entry or _entry(kind, buffer)
        for entry, kind, buffer in zip(lent, kinds, buffers, strict=True)
    ]
    token = held.hold(_of_kind(CMA, entries, buffers))
    following = [
        buffer for entry, buffer in zip(entries, buffers, strict=True) if entry.kind not in FETCHED
    ]
    striped = _of_kind(STRIPED, entries, buffers)
    in_slabs = [entry for entry in lent if entry is not None]
    return Prepared(encode_table(token, entries), following, striped, token, in_slabs)


def _prepare_one(
    buffer: memoryview, channels: Channels, held: HeldTensors, copier: Copier
) -> Prepared | None:
    """Does the same for the usual message, one tensor that follows or is in shared memory."""
    kind, lender = channels.channel_for(buffer.nbytes), channels.lender
    entry = None
    if lender is not None:
        if lender.has_shared:
            entry = lender.pass_on(buffer)
        if entry is None and kind == SHM:
            entry = lender.put(buffer, copier)
    if entry is not None:
        token = held.hold(())
        return Prepared(encode_table(token, (entry,)), (), (), token, (entry,))
    return None if kind in FETCHED else Prepared(b"", (buffer,))


def _stripe_together(
    kinds: list[ChannelKind], buffers: Sequence[memoryview], channels: Channels
) -> list[ChannelKind]:
    """Stripes tensors that are large together, as single large tensors are.

    Following the message, they would delay later messages just as long.
    """
    sizes = [buffer.nbytes for kind, buffer in zip(kinds, buffers, strict=True) if kind == STREAM]
    if channels.channel_for(sum(sizes)) != STRIPED:
        return kinds
    return [STRIPED if kind == STREAM else kind for kind in kinds]


def _lend(
    lender: Lender, kinds: Sequence[ChannelKind], buffers: Sequence[memoryview], copier: Copier
) -> list[BufferEntry | None]:
    """Lends buffers that the user shares, and copies ``SHM`` buffers into slabs if they fit."""
    entries: list[BufferEntry | None] = []
    try:
        for kind, buffer in zip(kinds, buffers, strict=True):
            entry = lender.pass_on(buffer)
            if entry is None and kind == SHM:
                entry = lender.put(buffer, copier)
            entries.append(entry)
    except BaseException:
        for entry in filter(None, entries):
            lender.take_back(entry)
        raise
    return entries


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
