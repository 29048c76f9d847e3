"""The channel table: an accepted table agrees with the received buffers, within the limit."""

from __future__ import annotations

from tests.fuzz.target import Target
from torchweft.channel.table import (
    FETCHED,
    BufferEntry,
    ChannelKind,
    SharedHandle,
    decode_table,
    encode_table,
)
from torchweft.errors import ProtocolError

_FOLLOWING = ((), (10,), (10, 300), (0, 0, 5))
_LIMIT_BYTES = 1 << 20


def run(data: bytes) -> Exception | None:
    """Decodes a table, with the following buffers that its first byte selects."""
    if not data:
        return None
    following = _FOLLOWING[data[0] % len(_FOLLOWING)]
    try:
        table = decode_table(memoryview(data)[1:], following, _LIMIT_BYTES)
    except ProtocolError as error:
        return error
    assert encode_table(*table) == data[1:], "something was made up"
    if table.entries:
        assert sum(entry.size_bytes for entry in table.entries) <= _LIMIT_BYTES
        sizes = tuple(entry.size_bytes for entry in table.entries if entry.kind not in FETCHED)
        assert sizes == following
    return None


def seeds() -> list[bytes]:
    """Returns tables with every kind of channel."""
    inline = BufferEntry(ChannelKind.INLINE, 10)
    stream = BufferEntry(ChannelKind.STREAM, 300)
    cma = BufferEntry(ChannelKind.CMA, 2000, 0x7000)
    shm = BufferEntry(ChannelKind.SHM, 2000, 0, 7)
    striped = BufferEntry(ChannelKind.STRIPED, _LIMIT_BYTES, 1, 2)
    device = BufferEntry(ChannelKind.CUDA_IPC, 2000, 512, 1 << 32 | 2)
    handle = SharedHandle(1, 4096, bytes(64))
    remote = BufferEntry(ChannelKind.RDMA, 2000, 1)
    slab = SharedHandle(1, 4096, b"description")
    return [
        b"\0",
        b"\0" + encode_table(1, [cma]),
        b"\0" + encode_table(2, [shm, shm]),
        b"\0" + encode_table(3, [striped]),
        b"\1" + encode_table(4, [inline, cma]),
        b"\2" + encode_table(5, [inline, shm, stream, cma]),
        b"\0" + encode_table(7, [device]),
        b"\2" + encode_table(8, [device, inline, stream, device], [handle, handle]),
        b"\0" + encode_table(9, [remote]),
        b"\1" + encode_table(10, [remote, inline, remote], [slab, slab]),
        b"\3"
        + encode_table(6, [BufferEntry(ChannelKind.INLINE, size) for size in (0, 0, 5)] + [shm]),
    ]


TARGET = Target("buffer_table", run, seeds, length_limit=512)
