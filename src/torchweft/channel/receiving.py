"""The receiver's side: fetches buffers that did not follow the message, and orders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torchweft.channel.choice import Channels
from torchweft.channel.copying import Copier
from torchweft.channel.memory import BufferPool
from torchweft.channel.table import CMA, BufferTable, ChannelKind

Buffer = TypeVar("Buffer")


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
