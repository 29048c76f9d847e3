"""The sender's side of shared memory: slabs that are lent out and come back without a message.

A loan is a slab, a ticket and a tag. The borrower writes the tag into the ticket's word when it is
done. The next search for memory here compares all words with the outstanding tags, finds the loan
ended, and reuses ticket and slab. Tags are never reused. So a tag written for an earlier loan of
the same ticket or slab cannot end a later loan, and writing twice has the effect of once.

- Growing costs more than copying: fresh pages have to be found and cleared. So a large slab is made
  at the second request for its size within some seconds; the first buffer takes the next best
  channel.
- Everything is bounded: all memory by ``limit_bytes``, every growth also by the memory left on the
  machine and in the container. Idle slabs of other sizes go first. Beyond that there is no loan.
- A lost borrower may live on and use its loans. They end when it writes their words, or when its
  process is certainly dead.
- A slab that the user shares (``share``) may be lent many times at once, and is free once its
  tensor has died here and all loans have ended.

A garbage collection under the lock may run a user's finalizer that sends a tensor. That tensor gets
no loan and takes the next best channel, so no step under the lock sees the state change. The
callback of a weak reference only appends to a deque.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np

from torchweft import knobs
from torchweft.channel.memory import Bytes, slab_size
from torchweft.channel.page_locks import PageLock, PageLocks
from torchweft.channel.shared_area import (
    SLABS_OFFSET,
    TICKET_BITS,
    TICKET_COUNT,
    TICKET_MASK,
    Process,
    available_bytes,
    create,
)
from torchweft.errors import ConfigurationError
from torchweft.serialize.tensors import shared_ranges

_FEW_LOANS = 16  # Up to this number, checking them one by one is faster.
AT_ONCE_BYTES = 1 << 20
"""Slabs up to this size are made at the first request."""
_UNSEEN_BYTES = 32 << 20
_UNSEEN_SHARE = 64
_LOOK_S = 1.0
"""How far the pool may grow on one look at the memory left: by so many bytes, by one such share of
what was left, and for so long. A look takes longer than to make a slab of 256 KiB."""


class Extents:
    """The free ranges within ``start`` to ``end``, in bytes. Not thread-safe.

    The first range that is long enough is taken; free neighbours are joined.
    """

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start]
        self._ends = [end]

    def take(self, size_bytes: int) -> int | None:
        """Takes a range and returns its start; None if no free range is long enough."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size_bytes:
                self._starts[index] += size_bytes
                if self._starts[index] == end:
                    del self._starts[index], self._ends[index]
                return start
        return None

    def give_back(self, start: int, size_bytes: int) -> None:
        """Frees a range that ``take`` returned, or any part of it."""
        end = start + size_bytes
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index and self._ends[index - 1] == start:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def free_bytes(self) -> int:
        """Returns the total of free bytes."""
        return sum(self._ends) - sum(self._starts)


class SharedStatistics(NamedTuple):
    """How much shared memory a worker has, in whole slabs."""

    resident_bytes: int
    idle_bytes: int
    loan_count: int
    tickets_used: int


class Borrower:
    """A peer as holder of loans."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.is_lost = False


class _Slab:
    """A range of the memory that is backed by pages."""

    __slots__ = ("idle_since_s", "is_owned", "loan_count", "lock", "offset", "size_bytes")

    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.loan_count = 0
        self.is_owned = False
        self.idle_since_s = 0.0
        self.lock: PageLock | None = None


class Loan(NamedTuple):
    """A slab lent to a borrower: its offset, and the tag that the borrower writes when done."""

    offset: int
    tag: int


class _Owned(weakref.ref[Bytes]):
    """Watches the memory of a shared tensor of this process, and knows its slab."""

    __slots__ = ("slab",)
    slab: _Slab


class SharedPool:
    """One worker's shared memory. Thread-safe. Memory in use outlives the pool.

    Args:
        limit_bytes: The most memory that it may take.

    Raises:
        OSError: The system provides no such memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.descriptor, self.area = create(limit_bytes)
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._extents = Extents(SLABS_OFFSET, SLABS_OFFSET + limit_bytes)
        self._idle: OrderedDict[int, list[_Slab]] = OrderedDict()
        self._resident_bytes = 0
        self._unseen_bytes = 0
        self._looks_again_s = 0.0
        self._missed: set[int] = set()
        self._serials = itertools.count(1)
        self._tags = np.zeros(TICKET_COUNT, dtype=np.uint64)
        self._free_tickets: list[int] = []
        self._tickets_used = 0
        self._loans: dict[int, tuple[int, _Slab, Borrower]] = {}
        self._words = self.area.words.data  # For single words this is faster than the array.
        self._shared: dict[int, _Slab] = {}
        self._owned: dict[int, _Owned] = {}
        self._ended: deque[Any] = deque()
        self._is_closed = False

    # Lending

    @property
    def has_shared(self) -> bool:
        """Whether the user shares any memory."""
        return bool(self._shared)

    def lend(self, size_bytes: int, borrower: Borrower) -> Loan | None:
        """Lends a slab of at least ``size_bytes``; returns None if there is none now.

        Its contents are undefined; the lender may write them until it tells the borrower of the
        loan.
        """
        if self._is_inside():
            return None
        slab_bytes = slab_size(size_bytes)
        with self._lock:
            slab = self._take(slab_bytes)
            if slab is not None:
                return self._issue(slab, slab.offset, borrower)
            if slab_bytes > AT_ONCE_BYTES and slab_bytes not in self._missed:
                self._missed.add(slab_bytes)
                return None
        slab = self._grow(slab_bytes)
        if slab is None:
            return None
        with self._lock:
            return self._issue(slab, slab.offset, borrower)

    def lend_shared(self, address: int, size_bytes: int, borrower: Borrower) -> Loan | None:
        """Lends memory that the user shares; None for other memory, or if no ticket is left."""
        start = address - self.area.address
        if not 0 <= start < self.area.size_bytes or self._is_inside():
            return None
        with self._lock:
            for slab in self._shared.values():
                if slab.offset <= start and start + size_bytes <= slab.offset + slab.size_bytes:
                    return self._issue(slab, start, borrower)
        return None

    def take_back(self, tag: int) -> None:
        """Ends a loan that the borrower was not told of."""
        ticket = tag & TICKET_MASK
        with self._lock:
            loan = self._loans.get(ticket)
            # If the borrower was lost in between, the loan may have ended already.
            if loan is not None and loan[0] == tag:
                self._end(ticket)

    def lose(self, borrower: Borrower) -> None:
        """Takes back a lost borrower's loans as soon as they cannot be in use."""
        borrower.is_lost = True
        with self._lock:
            self._reclaim_from_dead()

    def _is_inside(self) -> bool:
        """Whether this thread is in the middle of another method: a finalizer is running."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    # Issuing; under the lock

    def _issue(self, slab: _Slab, offset: int, borrower: Borrower) -> Loan | None:
        if self._is_closed:
            return None
        if self._free_tickets:
            ticket = self._free_tickets.pop()
        elif self._tickets_used < TICKET_COUNT:
            ticket, self._tickets_used = self._tickets_used, self._tickets_used + 1
        else:
            self._put_if_unused(slab)
            return None
        tag = next(self._serials) << TICKET_BITS | ticket
        slab.loan_count += 1
        self._loans[ticket] = (tag, slab, borrower)
        self._tags[ticket] = tag
        return Loan(offset, tag)

    def _take(self, slab_bytes: int) -> _Slab | None:
        slabs = self._idle.get(slab_bytes)
        if not slabs:
            self._collect()
            slabs = self._idle.get(slab_bytes)
            if not slabs:
                return None
        self._idle.move_to_end(slab_bytes)
        return slabs.pop()

    # Sharing with the user

    def share(self, size_bytes: int, locks: PageLocks | None = None) -> memoryview:
        """Returns memory that travels without a copy to peers that have this pool's memory mapped.

        Args:
            size_bytes: Its size.
            locks: Page-locks the memory, if given. The lock ends before the memory goes back to the
                system; until then the pool may use it for other data.

        Raises:
            MemoryError: The pool may not grow that far, or the memory cannot be page-locked.
        """
        slab_bytes, slab = slab_size(size_bytes), None
        if not self._is_inside():
            with self._lock:
                slab = self._take(slab_bytes)
            slab = slab or self._grow(slab_bytes)
        if slab is None:
            raise MemoryError(
                f"no {size_bytes} bytes of shared memory are left: {self._limit_bytes} are allowed "
                f"(WEFT_SHM_LIMIT_BYTES) and {self._resident_bytes} in use"
            )
        if locks is not None and slab.lock is None:
            self._lock_pages(slab, locks)
        exporter = self.area.memory[slab.offset : slab.offset + size_bytes]
        owned = _Owned(exporter, self._ended.append)
        owned.slab = slab
        with self._lock:
            slab.is_owned = True
            self._owned[id(owned)] = owned
            self._shared[slab.offset] = slab
        shared_ranges[self.area.address] = self.area.address + self.area.size_bytes
        return exporter.data

    def _lock_pages(self, slab: _Slab, locks: PageLocks) -> None:
        address = self.area.address + slab.offset
        lock = locks.lock(address, slab.size_bytes, keep=self.area.memory)
        if isinstance(lock, PageLock):
            slab.lock = lock
            return
        with self._lock:
            self._put_if_unused(slab)
        raise MemoryError(f"shared memory cannot be page-locked: {lock}")

    # Growing and shrinking

    def trim(self, idle_s: float = 0.0) -> int:
        """Gives slabs idle for ``idle_s`` seconds back to the system; returns their bytes."""
        if self._is_inside():
            return 0
        with self._lock:
            self._reclaim_from_dead()
            self._missed.clear()
        return self._drop_idle(idle_s)

    def _drop_idle(self, idle_s: float) -> int:
        unused = []
        with self._lock:
            self._collect()
            limit_s = time.monotonic() - idle_s
            for slabs in self._idle.values():
                unused += [slab for slab in slabs if slab.idle_since_s <= limit_s]
                slabs[:] = [slab for slab in slabs if slab.idle_since_s > limit_s]
        self._punch(unused)
        return sum(slab.size_bytes for slab in unused)

    def statistics(self) -> SharedStatistics:
        """Returns the amounts of memory, loans and tickets now."""
        with self._lock:
            self._collect()
            return SharedStatistics(
                self._resident_bytes, self._idle_bytes(), len(self._loans), self._tickets_used
            )

    def duplicate(self) -> int | None:
        """Returns a descriptor of the memory, for the caller to close; None after ``close``."""
        with self._lock:
            return None if self._is_closed else os.dup(self.descriptor)

    def close(self) -> None:
        """Stops lending, and gives back idle slabs. Lent or shared slabs stay as they are."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.trim()
        shared_ranges.pop(self.area.address, None)
        os.close(self.descriptor)

    def _grow(self, slab_bytes: int) -> _Slab | None:
        """Makes a slab, within all limits."""
        self._make_room(slab_bytes)
        offset = self._reserve(slab_bytes)
        if offset is None:
            return None
        slab = _Slab(offset, slab_bytes)
        try:
            self._look_for(slab_bytes)
            self.area.populate(offset, slab_bytes)
        except MemoryError:
            self._punch([slab])
            return None
        except BaseException:  # Ctrl-C: making a large slab takes long.
            self._punch([slab])
            raise
        return slab

    def _look_for(self, slab_bytes: int) -> None:
        """Raises MemoryError if the machine, or a limit, has too little memory left for a slab."""
        now_s = time.monotonic()
        with self._lock:
            if slab_bytes <= self._unseen_bytes and now_s < self._looks_again_s:
                self._unseen_bytes -= slab_bytes
                return
        left_bytes = available_bytes()
        # At most half of it: other processes look at the same figure at the same time.
        if slab_bytes > left_bytes // 2:
            raise MemoryError("the machine, or a limit, has too little memory left")
        with self._lock:
            self._unseen_bytes = min(left_bytes // _UNSEEN_SHARE, _UNSEEN_BYTES)
            self._looks_again_s = now_s + _LOOK_S

    def _reserve(self, slab_bytes: int) -> int | None:
        with self._lock:
            if self._is_closed or self._resident_bytes + slab_bytes > self._limit_bytes:
                return None
            offset = self._extents.take(slab_bytes)
            if offset is None and self._extents.free_bytes() + self._idle_bytes() >= slab_bytes:
                # Idle slabs lie in the way. Dropping them under the lock is slow, but rare.
                self._drop_idle(0.0)
                offset = self._extents.take(slab_bytes)
            if offset is not None:
                self._resident_bytes += slab_bytes
            return offset

    def _idle_bytes(self) -> int:
        return sum(size_bytes * len(slabs) for size_bytes, slabs in self._idle.items())

    def _make_room(self, slab_bytes: int) -> None:
        """Gives idle slabs back until one more fits, least recently requested sizes first."""
        unused: list[_Slab] = []
        with self._lock:
            missing_bytes = self._resident_bytes + slab_bytes - self._limit_bytes
            if missing_bytes > 0 and slab_bytes <= self._limit_bytes:
                for slabs in self._idle.values():
                    while slabs and missing_bytes > 0:
                        unused.append(slabs.pop(0))
                        missing_bytes -= unused[-1].size_bytes
        self._punch(unused)

    def _punch(self, slabs: list[_Slab]) -> None:
        """Gives back unused slabs; slow, so not under the lock, except in ``_reserve``."""
        for slab in slabs:
            if slab.lock is not None:
                slab.lock.release()
            self.area.punch(slab.offset, slab.size_bytes)
            with self._lock:
                self._extents.give_back(slab.offset, slab.size_bytes)
                self._resident_bytes -= slab.size_bytes

    # Ending loans; all under the lock

    def _collect(self) -> None:
        """Takes back all slabs that have become free."""
        if len(self._loans) <= _FEW_LOANS:
            words = self._words
            ended = [ticket for ticket, loan in self._loans.items() if words[ticket] == loan[0]]
        else:
            used = self._tickets_used
            tags = self._tags[:used]
            ended = np.flatnonzero((self.area.words[:used] == tags) & (tags != 0)).tolist()
        for ticket in ended:
            self._end(ticket)
        while self._ended:
            slab = self._owned.pop(id(self._ended.popleft())).slab
            slab.is_owned = False
            self._put_if_unused(slab)

    def _reclaim_from_dead(self) -> None:
        lost = {borrower for _, _, borrower in self._loans.values() if borrower.is_lost}
        dead = {borrower for borrower in lost if borrower.process.is_dead()}
        for ticket, (_, _, borrower) in list(self._loans.items()):
            if borrower in dead:
                self._end(ticket)

    def _end(self, ticket: int) -> None:
        _, slab, _ = self._loans.pop(ticket)
        self._tags[ticket] = 0
        self._free_tickets.append(ticket)
        slab.loan_count -= 1
        self._put_if_unused(slab)

    def _put_if_unused(self, slab: _Slab) -> None:
        if slab.loan_count or slab.is_owned:
            return
        self._shared.pop(slab.offset, None)
        slab.idle_since_s = time.monotonic()
        slabs = self._idle.get(slab.size_bytes)
        if slabs is None:
            slabs = self._idle[slab.size_bytes] = []
        slabs.append(slab)


def make_pool(limit_bytes: int) -> SharedPool | None:
    """Makes a pool with the knob's limit.

    A negative limit stands for a quarter of the memory that is left now, at most 4 GiB.

    Returns None if the limit is less than one slab, or the system has no such memory.
    """
    if limit_bytes < 0:
        limit_bytes = min(4 << 30, available_bytes() // 4) // SLABS_OFFSET * SLABS_OFFSET
    if limit_bytes >= 1 << 46:
        raise ConfigurationError(f"{limit_bytes} bytes of shared memory are beyond any machine's")
    try:
        return SharedPool(limit_bytes) if limit_bytes >= SLABS_OFFSET else None
    except (OSError, ValueError):
        return None


def why_no_pool(limit_bytes: int) -> str:
    """Returns why ``make_pool`` makes none of a limit."""
    if not 0 <= limit_bytes < SLABS_OFFSET:
        return "the system has none"
    least = f", and the least is {SLABS_OFFSET}" if limit_bytes else ""
    return f"{knobs.SHM_LIMIT_BYTES.variable} is {limit_bytes}{least}"
