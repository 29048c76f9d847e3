from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from weft import knobs
from weft.channel.choice import Channels
from weft.channel.cma import address_of
from weft.channel.sending import HeldTensors, prepare
from weft.channel.table import BufferEntry, ChannelKind, decode_table

INLINE, STREAM, CMA = ChannelKind.INLINE, ChannelKind.STREAM, ChannelKind.CMA


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
    assert prepare(buffers, channels, held) == (b"", buffers)
    assert prepare([], channels, held) == (b"", [])
    assert held.statistics() == (0, 0)


def test_large_buffers_are_described_and_held(channels: Channels) -> None:
    held = HeldTensors()
    buffers = [_buffer(100), _buffer(5), _buffer(50), memoryview(bytes(200))]
    table, following = prepare(buffers, channels, held)
    assert list(following) == [buffers[1], buffers[2]]
    token, entries = decode_table(table, [5, 50], limit_bytes=1000)
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
    assert prepare([_buffer(500)], channels, held)[0] == b""
    assert held.statistics() == (0, 0)
