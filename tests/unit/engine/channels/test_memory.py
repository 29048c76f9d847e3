from __future__ import annotations

import gc
import os
import threading
from types import TracebackType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.memory_counts import pool_counts
from torchweft.engine.channels.memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    BufferPool,
    address_of,
    slab_size,
)

MIB = 1 << 20


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(limit_bytes=64 * MIB)


def test_every_kind_of_view_keeps_the_slab(pool: BufferPool) -> None:
    lease = pool.lease(MIB)
    address = address_of(lease)
    views = [
        torch.frombuffer(lease, dtype=torch.uint8)[100:200].view(10, 10).t(),
        torch.frombuffer(lease[8:16], dtype=torch.int64),
        np.frombuffer(lease, dtype=np.uint8)[5:7],
        np.asarray(lease)[::2],
        lease[1000:][:10].cast("c"),
    ]
    del lease
    while views:
        other = pool.lease(MIB)
        assert address_of(other) != address, type(views[-1])
        del other, views[-1]
    # The slab that came back first is lent last.
    assert address in {address_of(each) for each in (pool.lease(MIB), pool.lease(MIB))}


def test_more_memory_than_there_is_raises(pool: BufferPool) -> None:
    with pytest.raises(MemoryError, match="no memory for a buffer"):
        pool.lease(1 << 60)


class _CollectingLock:
    """Collects garbage while it is held, the worst moment for a collection."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()
        gc.collect()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.collect()
        self._lock.release()


class _LeasesInItsFinalizer:
    """Cyclic garbage that holds a lease, and leases once more in its finalizer."""

    def __init__(self, pool: BufferPool) -> None:
        self.cycle = self
        self.pool = pool
        self.lease = pool.lease(MIB)

    def __del__(self) -> None:
        self.pool.lease(MIB)


def test_a_collection_inside_the_lock_may_end_and_begin_leases(
    pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        _LeasesInItsFinalizer(pool)
    monkeypatch.setattr(pool, "_lock", _CollectingLock(pool._lock))
    lease = pool.lease(MIB)
    statistics = pool_counts(pool)
    assert (statistics.leased_bytes, statistics.leased_count) == (MIB, 1)
    assert statistics.idle_bytes == (len(pool._by_address) - 1) * MIB
    assert len(pool._by_address) <= 4
    del lease


def test_no_slab_is_lent_twice_at_a_time(pool: BufferPool) -> None:
    wrong: list[int] = []

    def use(mark: int) -> None:
        for round_number in range(150):
            lease = pool.lease(4096 * (1 + round_number % 3))
            lease[0] = lease[-1] = mark
            other = torch.frombuffer(pool.lease(4096), dtype=torch.uint8)
            other[0] = 255 - mark
            if (lease[0], lease[-1]) != (mark, mark):
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool_counts(pool).leased_count == 0


@given(st.integers(min_value=1, max_value=1 << 40))
def test_slab_sizes_waste_at_most_a_quarter_or_a_page(size_bytes: int) -> None:
    slab_bytes = slab_size(size_bytes)
    page_bytes = HUGE_PAGE_BYTES if size_bytes > HUGE_PAGE_BYTES else PAGE_BYTES
    assert slab_bytes % page_bytes == 0
    assert size_bytes <= slab_bytes < size_bytes + max(size_bytes // 4 + 1, page_bytes)
    assert slab_size(slab_bytes) == slab_bytes


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not say")
def test_memory_that_may_never_be_filled_is_not_backed_with_pages() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as status:
            return int(status.read().split()[1]) * PAGE_BYTES

    before_bytes = resident_bytes()
    announced = BufferPool(0).lease(1 << 30)
    assert resident_bytes() - before_bytes < 64 << 20
    announced[1 << 29 : (1 << 29) + 4] = b"came"
    assert bytes(announced[1 << 29 : (1 << 29) + 4]) == b"came"
