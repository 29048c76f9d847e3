"""The channel ``shm``: the sender copies into memory that both processes have mapped.

The receiver's tensor is the sender's slab: only its place and the tag of the loan travel. Memory
that the user shares travels without a copy, whatever its size.

A worker's shared memory, as both sides map it::

    0          nonce, by which a peer checks that it was given the right memory
    4096       words, 8 bytes for each ticket
    2 MiB      slabs

A loan is a slab, a ticket and a tag. The borrower writes the tag into the ticket's word when it is
done. The next search for memory at the lender compares all words with the outstanding tags, finds
the loan ended, and reuses ticket and slab. Only the borrower writes a word, in one aligned store,
and only the lender reads it. Tags are never reused. So a tag written for an earlier loan of the
same ticket or slab cannot end a later loan, and writing twice has the effect of once.

The lender:

- Growing costs more than copying: fresh pages have to be found and cleared. So a large slab is made
  at the second request for its size within some seconds; the first buffer takes the next best
  channel.
- Everything is bounded: all memory by ``limit_bytes``, every growth also by the memory left on the
  machine and in the container. Idle slabs of other sizes go first. Beyond that there is no loan.
- A lost borrower may live on and use its loans, although its connection has ended. They end when it
  writes their words, or when its process is certainly dead. Process ids are reused, so the start
  time is recorded as well.
- A slab that the user shares (``share``) may be lent many times at once, and is free once its
  tensor has died here and all loans have ended.
- A garbage collection under the lock may run a user's finalizer that sends a tensor. That tensor
  gets no loan and takes the next best channel, so no step under the lock sees the state change.
- The file is sealed against a change of its size: touching a truncated part would end the process.
  Its size is the most that may ever be in use, and it takes memory only where it was touched. Idle
  memory is given back by punching holes into it.

The borrower: all views of received memory keep the object that exports it alive (see
``channels.memory``). When the exporter dies, a weak reference's callback stores one aligned word
where the lender will look. The callback also forgets the reference, and does nothing else. Ctrl-C
within the callback is lost on Python, and the loan with it: ``end_dead_loans``, called now and
then, ends such loans.

The store must not be reordered before this process's accesses to the slab. It is not: before the
store, the last owner of the memory has atomically decremented its reference count to zero.

A forked child has the mapping as well, and drops its copies of this process's tensors at any time.
That ends no loan: the child forgets all loans when it starts.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import itertools
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.channel import Channel, Entry, Handle, Home, Meeting, Peer
from torchweft.engine.channels.device_copies import PageLock, PageLocks
from torchweft.engine.channels.memory import (
    MADV_POPULATE_WRITE,
    Bytes,
    Exporters,
    IdleSlabs,
    available_bytes,
    madvise,
    slab_size,
)
from torchweft.engine.codec.tensors import shared_ranges
from torchweft.engine.io.handshake import credentials_of
from torchweft.engine.io.ring import create_sealed, sealed_size
from torchweft.errors import ConfigurationError, ProtocolError

Words = npt.NDArray[np.uint64]

NONCE_BYTES = 16
WORDS_OFFSET = 4096
TICKET_BITS = 16
TICKET_COUNT = 1 << TICKET_BITS
TICKET_MASK = TICKET_COUNT - 1
SLABS_OFFSET = 2 << 20
LOAN = struct.Struct("<QQ")
"""The handle: offset in the sender's memory, and tag, written once the last user is gone."""

AT_ONCE_BYTES = 1 << 20
"""Slabs up to this size are made at the first request."""
_UNSEEN_BYTES = 32 << 20
_UNSEEN_SHARE = 64
_LOOK_S = 1.0
"""How far the pool may grow on one look at the memory left: by so many bytes, by one such share of
what was left, and for so long. A look takes up to half a millisecond, and a receiver that keeps its
tensors makes every one of them grow the pool."""

# The kernel's part: memory, and processes

PROCESSES = Path("/proc")

_MADV_REMOVE = 9
_MADV_POPULATE_READ = 22
_DEAD = ("Z", "X")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A shared mapping, unmapped with the last array made of it.

    Not ``mmap.mmap``, which keeps its own descriptor open.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        protection, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        address = _libc.mmap(None, size_bytes, protection, shared, descriptor, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {size_bytes} bytes: {os.strerror(code)}")
        self._range = (address, size_bytes)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, False),
        }

    def __del__(self, unmap: Callable[..., int] = _libc.munmap) -> None:
        if hasattr(self, "_range"):
            unmap(*self._range)


class Area:
    """A worker's shared memory, as mapped in one process.

    The mapping ends with the last array or tensor made of it.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.memory: Bytes = np.asarray(_Mapping(descriptor, size_bytes))
        words = self.memory[WORDS_OFFSET : WORDS_OFFSET + 8 * TICKET_COUNT]
        self.words: Words = words.view(np.uint64)
        self.address = int(self.memory.ctypes.data)
        self.size_bytes = size_bytes

    @property
    def nonce(self) -> bytes:
        """The first bytes of the memory."""
        return self.memory[:NONCE_BYTES].tobytes()

    def populate(self, offset: int, size_bytes: int) -> None:
        """Has the kernel back a whole range with pages before anything is written.

        Raises:
            MemoryError: No pages are left.
        """
        code = madvise(self.address + offset, size_bytes, MADV_POPULATE_WRITE)
        if code == errno.EINVAL:  # a kernel before 5.14
            self.memory[offset : offset + size_bytes : mmap.PAGESIZE] = 0
        elif code:
            raise MemoryError(f"no shared memory for {size_bytes} bytes: {os.strerror(code)}")

    def map_pages(self, offset: int, size_bytes: int) -> None:
        """Enters existing pages into this process's page table, several at a time."""
        madvise(self.address + offset, size_bytes, _MADV_POPULATE_READ)

    def punch(self, offset: int, size_bytes: int) -> None:
        """Gives a range's pages back to the system; its contents are zeros from then on."""
        madvise(self.address + offset, size_bytes, _MADV_REMOVE)


def create(size_bytes: int) -> tuple[int, Area]:
    """Returns new shared memory for ``size_bytes`` of slabs, and its descriptor.

    Raises:
        OSError: The system has no such memory, or denies it to this process.
    """
    descriptor = create_sealed("weft", SLABS_OFFSET + size_bytes)
    try:
        area = Area(descriptor, SLABS_OFFSET + size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    area.memory[:NONCE_BYTES] = np.frombuffer(secrets.token_bytes(NONCE_BYTES), dtype=np.uint8)
    return descriptor, area


def attach(descriptor: int, nonce: bytes) -> Area:
    """Maps another process's shared memory.

    Args:
        descriptor: The descriptor that the other process handed over; stays open.
        nonce: The first bytes of the memory according to the other process.

    Raises:
        OSError: It cannot be mapped, or is not the memory that the other side described.
    """
    size_bytes = sealed_size(descriptor)
    if size_bytes <= SLABS_OFFSET:
        raise OSError(errno.EINVAL, f"{size_bytes} bytes are too few to hold anything")
    area = Area(descriptor, size_bytes)
    if not secrets.compare_digest(area.nonce, nonce):
        raise OSError(
            errno.EPERM, "the memory handed over is not the peer's: it has other contents"
        )
    return area


class Process(NamedTuple):
    """A process as seen from this one; ``pid`` is 0 if it is not visible."""

    pid: int
    started: str

    def is_dead(self) -> bool:
        """Whether the process is certainly dead; False also if this cannot be known."""
        if not self.pid:
            return False
        state, started = _state(self.pid)
        return started != self.started or state in _DEAD


def peer_of(connection: socket.socket) -> Process:
    """Returns the process at the other end of a Unix socket."""
    return process(credentials_of(connection)[0])


def process(pid: int) -> Process:
    """Returns a process that is alive now, by its id in this process's namespace."""
    started = _state(pid)[1] if pid else ""
    return Process(pid if started else 0, started)


def _state(pid: int) -> tuple[str, str]:
    """Returns the state and the start time; empty texts if there is no such process."""
    try:
        text = (PROCESSES / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return "", ""
    # The name, in parentheses, may contain any characters.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


# The lender


class Extents:
    """The free ranges within ``start`` to ``end``, in bytes. Not thread-safe.

    The first range that is long enough is taken; free neighbours are joined.
    """

    def __init__(self, start: int, end: int) -> None:
        self._free = [(start, end)]

    def take(self, size_bytes: int) -> int | None:
        """Takes a range and returns its start; None if no free range is long enough."""
        for index, (start, end) in enumerate(self._free):
            rest = start + size_bytes
            if rest <= end:
                self._free[index : index + 1] = [(rest, end)] if rest < end else []
                return start
        return None

    def give_back(self, start: int, size_bytes: int) -> None:
        """Frees a range that ``take`` returned, or any part of it."""
        end = start + size_bytes
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            _, end = self._free.pop(index)
        if index and self._free[index - 1][1] == start:
            index -= 1
            start, _ = self._free.pop(index)
        self._free.insert(index, (start, end))

    def free_bytes(self) -> int:
        """Returns the total of free bytes."""
        return sum(end - start for start, end in self._free)


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


class Loan(Handle):
    """A buffer in a slab, lent to the receiver.

    Attributes:
        offset: Where it lies in the lender's memory.
        tag: The number that the borrower writes when it is done.
    """

    __slots__ = ("_pool", "offset", "tag")

    def __init__(self, pool: SharedPool, offset: int, tag: int, size_bytes: int) -> None:
        self.content, self.size_bytes, self.kept = LOAN.pack(offset, tag), size_bytes, None
        self._pool, self.offset, self.tag = pool, offset, tag

    def take_back(self) -> None:
        self._pool.take_back(self.tag)


class SharedLoan(Loan):
    """A buffer that the user shares, lent as it is."""

    is_shared = True
    __slots__ = ()


class SharedPool:
    """One worker's shared memory. Thread-safe. Memory in use outlives the pool.

    Args:
        limit_bytes: The most memory that may be in use.

    Attributes:
        area: The memory.
        descriptor: Its descriptor.
        shared: The slabs that the user shares, by their offsets.

    Raises:
        OSError: The system provides no such memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.descriptor, self.area = create(limit_bytes)
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._is_inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        """Whether this thread is in the middle of another method: a finalizer is running."""
        self._extents = Extents(SLABS_OFFSET, SLABS_OFFSET + limit_bytes)
        self._idle = IdleSlabs[_Slab]()
        self._resident_bytes = 0
        self._unseen_bytes = 0
        self._looks_again_s = 0.0
        self._missed: set[int] = set()
        self._serials = itertools.count(1)
        self._tags = np.zeros(TICKET_COUNT, dtype=np.uint64)
        self._free_tickets: list[int] = []
        self._tickets_used = 0
        self._loans: dict[int, tuple[int, _Slab, Borrower]] = {}
        self.shared: dict[int, _Slab] = {}
        self._owned = Exporters[_Slab]()
        self._is_closed = False

    # Lending

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
                return self._issue(slab, slab.offset, size_bytes, borrower)
            if slab_bytes > AT_ONCE_BYTES and slab_bytes not in self._missed:
                self._missed.add(slab_bytes)
                return None
        slab = self._grow(slab_bytes)
        if slab is None:
            return None
        with self._lock:
            return self._issue(slab, slab.offset, size_bytes, borrower)

    def lend_shared(self, address: int, size_bytes: int, borrower: Borrower) -> Loan | None:
        """Lends memory that the user shares; None for other memory, or if no ticket is left."""
        start = address - self.area.address
        if not 0 <= start < self.area.size_bytes or self._is_inside():
            return None
        with self._lock:
            for slab in self.shared.values():
                if slab.offset <= start and start + size_bytes <= slab.offset + slab.size_bytes:
                    return self._issue(slab, start, size_bytes, borrower, SharedLoan)
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

    # Issuing; under the lock

    def _issue(
        self,
        slab: _Slab,
        offset: int,
        size_bytes: int,
        borrower: Borrower,
        kind: type[Loan] = Loan,
    ) -> Loan | None:
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
        return kind(self, offset, tag, size_bytes)

    def _take(self, slab_bytes: int) -> _Slab | None:
        slab = self._idle.take(slab_bytes)
        if slab is None:
            self._collect()
            slab = self._idle.take(slab_bytes)
        return slab

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
        with self._lock:
            slab.is_owned = True
            self._owned.add(exporter, slab)
            self.shared[slab.offset] = slab
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
        with self._lock:
            self._collect()
            unused = self._idle.take_older(idle_s)
        self._punch(unused)
        return sum(slab.size_bytes for slab in unused)

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
        except BaseException as error:  # Also Ctrl-C: making a large slab takes long.
            self._punch([slab])
            if isinstance(error, MemoryError):
                return None
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
            if offset is None and self._extents.free_bytes() + self._idle.size_bytes >= slab_bytes:
                # Idle slabs lie in the way. Dropping them under the lock is slow, but rare.
                self._drop_idle(0.0)
                offset = self._extents.take(slab_bytes)
            if offset is not None:
                self._resident_bytes += slab_bytes
            return offset

    def _make_room(self, slab_bytes: int) -> None:
        """Gives idle slabs back until one more fits, least recently requested sizes first."""
        unused: list[_Slab] = []
        with self._lock:
            if slab_bytes <= self._limit_bytes:
                missing_bytes = self._resident_bytes + slab_bytes - self._limit_bytes
                unused = self._idle.take_bytes(missing_bytes)
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
        used = self._tickets_used
        tags = self._tags[:used]
        ended = np.flatnonzero((self.area.words[:used] == tags) & (tags != 0))
        for ticket in ended.tolist():
            self._end(ticket)
        if self._owned.ended:
            for slab in self._owned.take_ended():
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
        self.shared.pop(slab.offset, None)
        self._idle.add(slab)


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


# The borrower


class _Lease(weakref.ref[Bytes]):
    """Watches the exporter of one loan, and knows the tag to write when it is gone."""

    __slots__ = ("tag", "words")
    tag: int
    words: Words


# One per process, because tensors outlive the agent that received them.
_leases: dict[int, _Lease] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leases.clear)


def _end(lease: weakref.ref[Bytes]) -> None:
    assert isinstance(lease, _Lease)
    lease.words[lease.tag & TICKET_MASK] = lease.tag
    _leases.pop(id(lease), None)


def end_dead_loans() -> None:
    """Ends the loans whose exporters have died, but whose callbacks were interrupted."""
    for lease in list(_leases.values()):
        if lease() is None:
            _end(lease)


class Borrowed:
    """One peer's shared memory, as mapped here. Thread-safe.

    Args:
        area: The mapping.
        peer: Name of the peer, for error messages.
    """

    def __init__(self, area: Area, peer: str) -> None:
        self._area = area
        self._peer = peer
        self._mapped: dict[int, int] = {}
        """How many bytes behind an offset have been mapped already."""

    def take(self, handle: bytes, size_bytes: int) -> memoryview:
        """Returns the memory of a buffer, writable; the loan ends with its last view.

        Raises:
            ProtocolError: The handle is malformed, or the buffer lies outside the slabs.
        """
        start, tag = _read(handle)
        area, end = self._area, start + size_bytes
        if not SLABS_OFFSET <= start < end <= area.size_bytes:
            raise ProtocolError(
                f"{self._peer} lends bytes {start} to {end} of its shared memory, which has slabs "
                f"from {SLABS_OFFSET} to {area.size_bytes}"
            )
        if self._mapped.get(start, 0) < size_bytes:
            # Faster than by single page faults. Two threads may both do it, and ``forget_pages``
            # may come in between: then pages are mapped once more, or one by one.
            first = start - start % 4096
            area.map_pages(first, end - first)
            self._mapped[start] = size_bytes
        exporter = area.memory[start:end]
        lease = _Lease(exporter, _end)
        lease.words, lease.tag = area.words, tag
        _leases[id(lease)] = lease
        return exporter.data

    def refuse(self, handle: bytes) -> None:
        """Ends the loan of a buffer that will not be read."""
        _, tag = _read(handle)
        self._area.words[tag & TICKET_MASK] = tag

    def forget_pages(self) -> None:
        """Forgets which pages were mapped: the lender may have given some back."""
        self._mapped.clear()


def _read(handle: bytes) -> tuple[int, int]:
    if len(handle) != LOAN.size:
        raise ProtocolError(f"a handle of shared memory has {len(handle)} bytes")
    offset, tag = LOAN.unpack(handle)
    return offset, tag


class SharedMemory(Channel):
    """Tensors in memory of this worker that its peers have mapped, and in theirs.

    A descriptor travels over Unix sockets only, behind a greeting that answers one with the secret
    of the run: no other process gets it. A peer in another container gets it as well, if it reaches
    this worker by such a socket.

    Attributes:
        pool: This worker's shared memory; None if there is none.
    """

    name, number = "shm", 3
    is_held = False

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.from_bytes = knobs.SHM_FROM_BYTES.get()
        self.pool = make_pool(knobs.SHM_LIMIT_BYTES.get())
        self._borrowers: dict[int, Borrower] = {}
        self._borrowed: dict[int, Borrowed] = {}
        self._lost: set[int] = set()
        self._lost_before: set[int] = set()

    def describe(self) -> dict[str, object]:
        return {"nonce": "" if self.pool is None else self.pool.area.nonce.hex()}

    def hand_over(self) -> int | None:
        return None if self.pool is None else self.pool.duplicate()

    def accept(self, peer: Peer, meeting: Meeting) -> str:
        nonce, connection = meeting.text("nonce"), meeting.connection
        if connection is not None and connection.family == socket.AF_UNIX:
            self._borrowers.setdefault(peer.id, Borrower(peer_of(connection)))
        if meeting.descriptor is None:
            return "the peer has handed over no shared memory"
        try:
            area = attach(meeting.descriptor, bytes.fromhex(nonce))
        except (OSError, ValueError) as error:
            return f"the peer's shared memory cannot be mapped: {error}"
        self._borrowed[peer.id] = Borrowed(area, f"worker {peer.name!r}")
        return ""

    def put(self, peer: Peer, token: int, buffers: Sequence[Tensor]) -> Sequence[Handle | None]:
        pool, borrower = self.pool, self._borrowers.get(peer.id)
        if pool is None or borrower is None:
            return ()
        area, copy = pool.area, self._home.copier.copy
        handles: list[Loan | None] = []
        try:
            for buffer in buffers:
                address, size_bytes, loan = buffer.data_ptr(), buffer.nbytes, None
                if pool.shared and size_bytes:
                    loan = pool.lend_shared(address, size_bytes, borrower)
                if loan is None and size_bytes >= self.from_bytes:
                    loan = pool.lend(size_bytes, borrower)
                handles.append(loan)
                if loan is not None and not loan.is_shared:
                    copy(address, area.address + loan.offset, size_bytes, (buffer, area.memory))
        except BaseException:
            for handle in filter(None, handles):
                handle.take_back()
            raise
        return handles

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[memoryview]:
        borrowed = self._of(peer)
        buffers: list[memoryview] = []
        try:
            for _, size_bytes, handle, _ in entries:
                buffers.append(borrowed.take(handle, size_bytes))
        except ProtocolError:
            self.drop(peer, token, entries)
            raise
        return buffers

    def drop(self, peer: Peer, token: int, entries: Sequence[Entry]) -> None:
        borrowed = self._of(peer)
        for entry in entries:
            borrowed.refuse(entry.content)

    def lost(self, peer: Peer) -> None:
        """Takes back the memory lent to a lost peer, as soon as that is safe."""
        self._lost.add(peer.id)
        borrower = self._borrowers.pop(peer.id, None)
        if self.pool is not None and borrower is not None:
            self.pool.lose(borrower)

    def tick(self, now_s: float) -> None:
        end_dead_loans()
        if self.pool is not None:
            self.pool.trim(self._home.idle_s)
        # What arrived before the loss has been read by then. Tensors in the memory keep it mapped.
        for peer in self._lost_before:
            self._borrowed.pop(peer, None)
        self._lost_before, self._lost = self._lost, set()
        for borrowed in list(self._borrowed.values()):
            borrowed.forget_pages()

    def close(self, limit_s: float) -> None:
        """Stops lending; memory in use stays."""
        if self.pool is not None:
            self.pool.close()

    def _of(self, peer: Peer) -> Borrowed:
        borrowed = self._borrowed.get(peer.id)
        if borrowed is None:
            raise ProtocolError(f"worker {peer.name!r} lends shared memory that is not mapped here")
        return borrowed
