"""The receiver's side: fetching what did not follow the message, and putting it in order."""

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
    """Pulls the buffers that a table says come by ``CMA``, into leased memory.

    It blocks for as long as the copies take. On success the sender is to be told the table's
    token; on failure it is to be asked, with the same token, to send these buffers another way.

    Args:
        table: What the sender said.
        channels: The ways to and from the sender; they know its process, as proven at connect.
        pool: Where to take memory.
        copier: Does the copies.

    Raises:
        PullError: The sender's memory cannot be read, or not any more.
        ProtocolError: The sender was told that it cannot be pulled from.
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
    """Puts the buffers that followed and those that were fetched in the message's order.

    There are as many of each kind as ``table`` says.
    """
    if not table.entries:
        return following
    rest = iter(following)
    sources = {kind: iter(buffers) for kind, buffers in fetched.items()}
    return [next(sources.get(entry.kind, rest)) for entry in table.entries]
