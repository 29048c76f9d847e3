"""The channel table: an accepted table agrees with the received buffers, within the limit."""

from __future__ import annotations

from tests.fuzz.target import Target
from torchweft.engine.channels.channel import Entry
from torchweft.engine.worker.tensor_messages import FOLLOWS, decode_table, encode_table
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
        sizes = tuple(each.size_bytes for each in table.entries if each.channel == FOLLOWS)
        assert sizes == following
    return None


def seeds() -> list[bytes]:
    """Returns tables with buffers that follow and with handles of several lengths."""
    small, large = Entry(FOLLOWS, 10), Entry(FOLLOWS, 300)
    address = Entry(2, 2000, bytes(8))
    loan = Entry(3, 2000, bytes(16))
    striped = Entry(4, _LIMIT_BYTES, bytes(4))
    described = Entry(6, 2000, bytes(12) + b"description")
    return [
        b"\0",
        b"\0" + encode_table(1, [address]),
        b"\0" + encode_table(2, [loan, loan]),
        b"\0" + encode_table(3, [striped]),
        b"\1" + encode_table(4, [small, address]),
        b"\2" + encode_table(5, [small, loan, large, address]),
        b"\1" + encode_table(10, [described, small, described]),
        b"\3" + encode_table(6, [Entry(FOLLOWS, size) for size in (0, 0, 5)] + [loan]),
    ]


TARGET = Target("buffer_table", run, seeds, length_limit=512)
