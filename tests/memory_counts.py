"""Counts what pools of memory have, and what is kept for a peer, by looking into them."""

from __future__ import annotations

from typing import NamedTuple

from torchweft.engine.channels.channel import INLINE, STREAM, Held, Ways
from torchweft.engine.channels.memory import BufferPool
from torchweft.engine.channels.shm import SharedPool


class HeldCounts(NamedTuple):
    """The buffers that a peer has not reported on yet."""

    message_count: int
    size_bytes: int


class PoolCounts(NamedTuple):
    """How much memory a pool has, in whole slabs."""

    leased_bytes: int
    idle_bytes: int
    leased_count: int


class SharedCounts(NamedTuple):
    """How much shared memory a worker has, in whole slabs."""

    resident_bytes: int
    idle_bytes: int
    loan_count: int
    tickets_used: int


def held_counts(held: Held) -> HeldCounts:
    """Returns how much is held for a peer now."""
    with held._lock:
        kept = [handle.size_bytes for each in held._held.values() for _, handle in each]
        return HeldCounts(len(held._held), sum(kept))


def pool_counts(pool: BufferPool) -> PoolCounts:
    """Returns how much memory is lent and how much is idle now."""
    with pool._lock:
        unused = pool._reclaim()
        leased = [slab.size_bytes for slab in pool._leases.all()]
        idle_bytes = pool._idle.size_bytes
    del unused
    return PoolCounts(sum(leased), idle_bytes, len(leased))


def shared_counts(pool: SharedPool) -> SharedCounts:
    """Returns the amounts of memory, loans and tickets now."""
    with pool._lock:
        pool._collect()
        idle_bytes = pool._idle.size_bytes
        return SharedCounts(pool._resident_bytes, idle_bytes, len(pool._loans), pool._tickets_used)


def first_for(ways: Ways, size_bytes: int) -> str:
    """Returns the name of the channel that is offered a buffer of the host of that size."""
    if size_bytes <= ways.inline_limit_bytes:
        return INLINE
    fitting = (name for name, least_bytes in ways.sizes() if size_bytes >= least_bytes)
    return next(fitting, STREAM)
