from __future__ import annotations

import os

import pytest

from torchweft.channel.buffers import in_order, pull_buffers
from torchweft.channel.choice import Channels
from torchweft.channel.cma import Nonce, PullError, address_of, find_obstacle
from torchweft.channel.copying import Copier
from torchweft.channel.memory import BufferPool
from torchweft.channel.table import EMPTY_TABLE, BufferEntry, BufferTable, ChannelKind
from torchweft.errors import ProtocolError

INLINE, STREAM, CMA, SHM, *_ = ChannelKind

_nonce = Nonce()
_obstacle = find_obstacle(os.getpid(), _nonce.address, _nonce.value)
needs_cma = pytest.mark.skipif(bool(_obstacle), reason=f"no cma here: {_obstacle}")

POOL = BufferPool(limit_bytes=0)
COPIER = Copier()


def _channels(obstacle: str = "") -> Channels:
    return Channels("ps", os.getpid(), {CMA: obstacle})


def test_what_was_never_tried_is_not_pulled() -> None:
    with pytest.raises(ProtocolError, match="has not tried"):
        Channels("ps", os.getpid()).source_pid()


@needs_cma
def test_only_what_is_announced_is_pulled() -> None:
    first, second = memoryview(bytearray(b"abc")), memoryview(bytearray(b"defgh"))
    entries = (
        BufferEntry(CMA, 3, address_of(first)),
        BufferEntry(STREAM, 7),
        BufferEntry(CMA, 5, address_of(second)),
    )
    pulled = pull_buffers(BufferTable(1, entries), _channels(), POOL, COPIER)
    assert [bytes(each) for each in pulled] == [b"abc", b"defgh"]
    pulled[0][:] = b"xyz"
    assert bytes(first) == b"abc"


def test_a_message_without_table_pulls_nothing() -> None:
    assert pull_buffers(EMPTY_TABLE, _channels("another host"), POOL, COPIER) == []


def test_memory_of_an_unproven_process_is_never_read() -> None:
    table = BufferTable(1, (BufferEntry(CMA, 16, _nonce.address),))
    with pytest.raises(ProtocolError, match=r"ps wants .* another host"):
        pull_buffers(table, _channels("it is on another host"), POOL, COPIER)


def test_a_failed_pull_keeps_no_memory() -> None:
    pool = BufferPool(limit_bytes=0)
    table = BufferTable(1, (BufferEntry(CMA, 16, 0x10),))
    with pytest.raises(PullError):
        pull_buffers(table, _channels(), pool, COPIER)
    assert pool.statistics().leased_count == 0


def test_buffers_are_put_in_the_message_s_order() -> None:
    kinds = (STREAM, CMA, INLINE, CMA)
    table = BufferTable(1, tuple([BufferEntry(kind, 1, 0) for kind in kinds]))
    assert in_order(table, ["a", "c"], {CMA: ["b", "d"]}) == ["a", "b", "c", "d"]
    assert in_order(EMPTY_TABLE, ["a", "c"], {}) == ["a", "c"]
    both = BufferTable(1, tuple([BufferEntry(kind, 1, 0) for kind in (SHM, CMA, STREAM, SHM)]))
    assert in_order(both, ["c"], {CMA: ["b"], SHM: ["a", "d"]}) == ["a", "b", "c", "d"]
