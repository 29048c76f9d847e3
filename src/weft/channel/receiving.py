"""The receiver's side: fetching what did not follow the message, and putting it in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from weft.channel.choice import Channels
from weft.channel.cma import Puller
from weft.channel.memory import BufferPool
from weft.channel.table import CMA, BufferTable

Buffer = TypeVar("Buffer")


def pull_buffers(
    table: BufferTable, channels: Channels, pool: BufferPool, puller: Puller
) -> list[memoryview]:
    """Pulls the buffers that a table says are to be pulled, into leased memory.

    It blocks for as long as the copies take. On success the sender is to be told the table's
    token; on failure it is to be asked, with the same token, to send these buffers another way.

    Args:
        table: What the sender said.
        channels: The ways to and from the sender; they know its process, as proven at connect.
        pool: Where to take memory.
        puller: What does the copies.

    Raises:
        PullError: The sender's memory cannot be read, or not any more.
        ProtocolError: The sender was told that it cannot be pulled from.
    """
    if not table.entries:
        return []
    pid = channels.source_pid()
    pulled = []
    for kind, size_bytes, address in table.entries:
        if kind == CMA:
            buffer = pool.lease(size_bytes)
            puller.pull(pid, address, buffer)
            pulled.append(buffer)
    return pulled


def in_order(
    table: BufferTable, following: Sequence[Buffer], pulled: Sequence[Buffer]
) -> Sequence[Buffer]:
    """Puts the buffers that followed and those that were fetched in the message's order.

    Both are as many as ``table`` says; ``decode_table`` and ``pull_buffers`` see to that.
    """
    if not table.entries:
        return following
    rest, fetched = iter(following), iter(pulled)
    return [next(fetched) if entry.kind == CMA else next(rest) for entry in table.entries]
