from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from tests.unit.channel.fake_transport import FakeNetwork
from torchweft import knobs
from torchweft.channel.buffers import HeldTensors, prepare
from torchweft.channel.choice import Channels
from torchweft.channel.cma import address_of
from torchweft.channel.copying import Copier
from torchweft.channel.shm.kernel import process
from torchweft.channel.shm.pool import Lender, SharedPool
from torchweft.channel.slabs import Budget, SendingSlabs, Staged
from torchweft.channel.table import BufferEntry, ChannelKind, decode_table

INLINE, STREAM, CMA, SHM, STRIPED, CUDA_IPC, RDMA = ChannelKind


COPIER = Copier()


def _buffer(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


@pytest.fixture
def channels() -> Channels:
    with knobs.INLINE_LIMIT_BYTES.override(10), knobs.CMA_FROM_BYTES.override(100):
        made = Channels("ps", 1, "")
    made.confirm({"cma": ""})
    return made


def test_release_returns_what_was_held_once() -> None:
    held = HeldTensors()
    first, second = [_buffer(10)], [_buffer(20), _buffer(30)]
    tokens = held.hold(first), held.hold(second)
    assert held.statistics() == (2, 60)
    assert held.release(tokens[1]) is second
    assert held.release(tokens[1]) is None
    assert held.statistics() == (1, 10)
    assert held.release(tokens[0]) is first
    assert held.statistics() == (0, 0)


def test_memory_is_kept_until_released() -> None:
    held = HeldTensors()
    array = np.zeros(100, dtype=np.uint8)
    alive = weakref.ref(array)
    token = held.hold([array.data])
    del array
    assert alive() is not None
    held.release(token)
    assert alive() is None


def test_close_lets_go_of_everything_for_good() -> None:
    held = HeldTensors()
    arrays = [np.zeros(100, dtype=np.uint8) for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    held.hold([arrays[0].data])
    held.close()
    token = held.hold([arrays[1].data])
    arrays.clear()
    assert [each() for each in alive] == [None, None]
    assert held.statistics() == (0, 0)
    assert held.release(token) is None


def test_a_finalizer_may_use_what_is_letting_go_of_it() -> None:
    held = HeldTensors()
    array = np.zeros(100, dtype=np.uint8)
    seen: list[tuple[int, int]] = []
    weakref.finalize(array, lambda: seen.append(held.statistics()))
    held.hold([array.data])
    del array
    held.close()
    assert seen == [(0, 0)]


def test_tokens_of_many_threads_differ() -> None:
    held = HeldTensors()
    tokens: list[int] = []

    def hold_and_release() -> None:
        for _ in range(300):
            tokens.append(held.hold([_buffer(3)]))
            held.release(tokens[-1] if len(tokens) % 2 else held.hold([_buffer(3)]))

    threads = [threading.Thread(target=hold_and_release) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for token in tokens:
        held.release(token)
    assert len(set(tokens)) == 900
    assert held.statistics() == (0, 0)


def test_small_buffers_follow_without_a_table(channels: Channels) -> None:
    held = HeldTensors()
    buffers = [_buffer(0), _buffer(10), _buffer(99)]
    assert prepare(buffers, channels, held, COPIER)[:2] == (b"", buffers)
    assert prepare([], channels, held, COPIER)[:2] == (b"", [])
    assert held.statistics() == (0, 0)


def test_large_buffers_are_described_and_held(channels: Channels) -> None:
    held = HeldTensors()
    buffers = [_buffer(100), _buffer(5), _buffer(50), memoryview(bytes(200))]
    prepared = prepare(buffers, channels, held, COPIER)
    assert list(prepared.following) == [buffers[1], buffers[2]]
    token, entries, _ = decode_table(prepared.table, [5, 50], limit_bytes=1000)
    assert token == prepared.token
    assert entries == (
        BufferEntry(CMA, 100, address_of(buffers[0])),
        BufferEntry(INLINE, 5),
        BufferEntry(STREAM, 50),
        BufferEntry(CMA, 200, address_of(buffers[3])),
    )
    assert held.statistics() == (1, 300)
    released = held.release(token)
    assert released is not None
    assert [id(each) for each in released] == [id(buffers[0]), id(buffers[3])]


def test_a_disabled_channel_is_no_longer_used(channels: Channels) -> None:
    held = HeldTensors()
    channels.disable(CMA, "tried in vain")
    assert prepare([_buffer(500)], channels, held, COPIER).table == b""
    assert held.statistics() == (0, 0)


# Shared memory


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    made = SharedPool(4 << 20)
    yield made
    made.close()


@pytest.fixture
def lending(pool: SharedPool) -> Channels:
    with (
        knobs.INLINE_LIMIT_BYTES.override(10),
        knobs.SHM_FROM_BYTES.override(100),
        knobs.CMA_FROM_BYTES.override(200),
    ):
        made = Channels("ps", 1)
    made.lend_by(Lender(pool, process(os.getpid())))
    made.confirm({"shm": "", "cma": ""})
    return made


def test_what_goes_through_shared_memory_is_copied_and_not_held(
    lending: Channels, pool: SharedPool
) -> None:
    held = HeldTensors()
    buffers = [_buffer(50), memoryview(bytearray(b"x" * 150))]
    prepared = prepare(buffers, lending, held, COPIER)
    assert list(prepared.following) == [buffers[0]]
    _, (_, entry), _ = decode_table(prepared.table, [50], limit_bytes=1000)
    assert (entry.kind, entry.size_bytes) == (SHM, 150)
    buffers[1][:] = bytes(150)
    assert pool.area.memory[entry.place : entry.place + 150].tobytes() == b"x" * 150
    assert held.statistics() == (0, 0)
    assert pool.statistics().loan_count == 1
    prepared.take_back(lending, held)
    assert pool.statistics().loan_count == 0


def test_what_has_no_room_in_shared_memory_takes_the_next_way(
    lending: Channels, pool: SharedPool
) -> None:
    pool.close()
    held = HeldTensors()
    prepared = prepare([_buffer(150), _buffer(250)], lending, held, COPIER)
    _, entries, _ = decode_table(prepared.table, [150], limit_bytes=1000)
    assert [entry.kind for entry in entries] == [STREAM, CMA]
    prepared.take_back(lending, held)
    assert held.statistics() == (0, 0)
    assert prepare([_buffer(150)], lending, held, COPIER).table == b""


def test_memory_that_the_user_shares_is_lent_as_it_is_whatever_its_size(
    lending: Channels, pool: SharedPool
) -> None:
    memory = pool.share(1000)
    prepared = prepare([memory[3:5], memory[5:5]], lending, HeldTensors(), COPIER)
    _, (entry, _), _ = decode_table(prepared.table, [0], limit_bytes=1000)
    assert entry.kind == SHM
    assert pool.area.address + entry.place == address_of(memory) + 3


def test_a_copy_that_fails_leaves_no_loan(
    lending: Channels, pool: SharedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def fail_at_second(source: memoryview, into: memoryview) -> None:
        copied.append(source.nbytes)
        if len(copied) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(COPIER, "copy", fail_at_second)
    with pytest.raises(KeyboardInterrupt):
        prepare([_buffer(150), _buffer(150)], lending, HeldTensors(), COPIER)
    assert pool.statistics().loan_count == 0


@pytest.fixture
def striping() -> Channels:
    """A peer that shares no memory."""
    with knobs.INLINE_LIMIT_BYTES.override(10), knobs.STRIPED_FROM_BYTES.override(100):
        made = Channels("ps", 1)
    made.confirm({"striped": ""})
    return made


def test_what_is_striped_does_not_follow(striping: Channels) -> None:
    held = HeldTensors()
    buffers = [_buffer(5), _buffer(100), _buffer(300)]
    prepared = prepare(buffers, striping, held, COPIER, lambda: True)
    assert prepared.striped == buffers[1:]
    assert prepared.following == buffers[:1]
    table = decode_table(prepared.table, [5], 1000)
    assert [entry.kind for entry in table.entries] == [INLINE, STRIPED, STRIPED]
    assert table.token == prepared.token > 0
    assert held.statistics() == (0, 0)


def test_tensors_that_are_large_together_are_striped(striping: Channels) -> None:
    buffers = [_buffer(60), _buffer(10), _buffer(40)]
    prepared = prepare(buffers, striping, HeldTensors(), COPIER, lambda: True)
    assert prepared.striped == [buffers[0], buffers[2]]
    assert prepare(buffers[:2], striping, HeldTensors(), COPIER, lambda: True).table == b""


def test_what_cannot_be_striped_follows(striping: Channels) -> None:
    buffers = [_buffer(60), _buffer(200)]
    prepared = prepare(buffers, striping, HeldTensors(), COPIER, lambda: False)
    assert prepared.table == b""
    assert prepared.following == buffers
    assert prepared.striped == []


# Slabs


@pytest.fixture
def slabs() -> SendingSlabs:
    with knobs.RDMA_FROM_BYTES.override(100):
        return SendingSlabs(FakeNetwork().open_endpoint(), _buffer, Budget(1000))


@pytest.fixture
def remote() -> Channels:
    """A peer on another host."""
    with (
        knobs.INLINE_LIMIT_BYTES.override(10),
        knobs.RDMA_FROM_BYTES.override(100),
        knobs.STRIPED_FROM_BYTES.override(300),
    ):
        made = Channels("ps", 1)
    made.confirm({"rdma": "", "striped": ""})
    return made


def test_copies_in_slabs_are_held_and_described(remote: Channels, slabs: SendingSlabs) -> None:
    held = HeldTensors()
    buffers = [_buffer(5), memoryview(b"x" * 120), memoryview(b"y" * 500)]
    prepared = prepare(
        buffers, remote, held, COPIER, lambda: True, lambda each: slabs.put(each, COPIER)
    )
    assert list(prepared.following) == buffers[:1]
    assert prepared.staged_bytes == 620
    token, entries, handles = decode_table(prepared.table, [5], limit_bytes=1000)
    assert entries == (BufferEntry(INLINE, 5), BufferEntry(RDMA, 120, 1), BufferEntry(RDMA, 500, 2))
    assert [(each.number, each.size_bytes) for each in handles] == [(1, 128), (2, 512)]
    assert held.statistics() == (1, 620)
    released = held.release(token)
    assert released is not None
    assert [bytes(each.memory) for each in released if isinstance(each, Staged)] == buffers[1:]


def test_buffers_without_a_slab_take_the_next_way(remote: Channels) -> None:
    buffers = [_buffer(120), _buffer(500)]
    prepared = prepare(buffers, remote, HeldTensors(), COPIER, lambda: True)
    assert list(prepared.following) == buffers[:1]
    assert list(prepared.striped) == buffers[1:]
    assert not prepared.staged_bytes


def test_tensors_that_are_large_together_are_striped_beside_slabs(remote: Channels) -> None:
    buffers = [_buffer(90) for _ in range(4)]
    prepared = prepare(buffers, remote, HeldTensors(), COPIER, lambda: True)
    assert list(prepared.striped) == buffers


def test_no_message_is_both_pulled_and_read_from_slabs(slabs: SendingSlabs) -> None:
    with (
        knobs.INLINE_LIMIT_BYTES.override(10),
        knobs.RDMA_FROM_BYTES.override(100),
        knobs.CMA_FROM_BYTES.override(300),
    ):
        channels = Channels("ps", 1)
    channels.confirm({"rdma": "", "cma": ""})
    held = HeldTensors()
    prepared = prepare(
        [_buffer(120), _buffer(500)],
        channels,
        held,
        COPIER,
        stage=lambda each: slabs.put(each, COPIER),
    )
    assert [entry.kind for entry in decode_table(prepared.table, [], 1000).entries] == [RDMA, RDMA]
    assert held.statistics() == (1, 620)
