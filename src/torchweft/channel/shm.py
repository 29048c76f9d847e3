"""The channel ``shm``: the sender copies into memory that both processes have mapped.

The receiver's tensor is the sender's slab (``torchweft.channel.shared_pool``): only its place and
the tag of the loan travel. Memory that the user shares travels without a copy, whatever its size.

All views of received memory keep the object that exports it alive (see ``channel.memory``). When
the exporter dies, a weak reference's callback stores one aligned word where the lender will look.
The callback also forgets the reference, and does nothing else. Ctrl-C within the callback is lost
on Python, and the loan with it: ``end_dead_loans``, called now and then, ends such loans.

The store must not be reordered before this process's accesses to the slab. It is not: before the
store, the last owner of the memory has atomically decremented its reference count to zero.

A forked child has the mapping as well, and drops its copies of this process's tensors at any time.
That ends no loan: the child forgets all loans when it starts.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Sequence

from torchweft import knobs
from torchweft.channel.channel import Channel, Entry, Handle, Home, Meeting, Peer
from torchweft.channel.copying import address_of
from torchweft.channel.memory import Bytes
from torchweft.channel.shared_area import SLABS_OFFSET, TICKET_MASK, Area, Words, attach
from torchweft.channel.shared_pool import Borrower, Loan, SharedPool, make_pool
from torchweft.errors import ProtocolError

_LOAN = struct.Struct("<QQ")
"""The handle: offset in the sender's memory, and tag, written once the last user is gone."""


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
        self._lock = threading.RLock()

    def take(self, loan: Loan, size_bytes: int) -> memoryview:
        """Returns the memory of a buffer, writable; the loan ends with its last view.

        Raises:
            ProtocolError: The buffer lies outside the slabs.
        """
        start, end = loan.offset, loan.offset + size_bytes
        if not SLABS_OFFSET <= start < end <= self._area.size_bytes:
            raise ProtocolError(
                f"{self._peer} lends bytes {start} to {end} of its shared memory, which has slabs "
                f"from {SLABS_OFFSET} to {self._area.size_bytes}"
            )
        self._map(start, size_bytes)
        exporter = self._area.memory[start:end]
        lease = _Lease(exporter, _end)
        lease.words, lease.tag = self._area.words, loan.tag
        _leases[id(lease)] = lease
        return exporter.data

    def refuse(self, loan: Loan) -> None:
        """Ends the loan of a buffer that will not be read."""
        self._area.words[loan.tag & TICKET_MASK] = loan.tag

    def forget_pages(self) -> None:
        """Forgets which pages were mapped: the lender may have given some back."""
        with self._lock:
            self._mapped.clear()

    def _map(self, start: int, size_bytes: int) -> None:
        """Maps the pages of a slab that has not come before, faster than by single page faults."""
        with self._lock:
            if self._mapped.get(start, 0) >= size_bytes:
                return
            self._mapped[start] = size_bytes
        first = start - start % 4096
        self._area.map_pages(first, start + size_bytes - first)


class _Lent(Handle):
    """A buffer in a slab, lent to the receiver."""

    __slots__ = ("_pool", "_tag")

    def __init__(self, pool: SharedPool, loan: Loan, size_bytes: int) -> None:
        self.content, self.size_bytes, self.kept = _LOAN.pack(*loan), size_bytes, None
        self._pool = pool
        self._tag = loan.tag

    def take_back(self) -> None:
        self._pool.take_back(self._tag)


class _Shared(_Lent):
    """A buffer that the user shares, lent as it is."""

    is_shared = True
    __slots__ = ()


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
        nonce = meeting.text("nonce")
        if self.pool is not None and meeting.process is not None:
            self._borrowers.setdefault(peer.id, Borrower(meeting.process))
        if meeting.descriptor is None:
            return "the peer has handed over no shared memory"
        try:
            area = attach(meeting.descriptor, bytes.fromhex(nonce))
        except (OSError, ValueError) as error:
            return f"the peer's shared memory cannot be mapped: {error}"
        self._borrowed[peer.id] = Borrowed(area, f"worker {peer.name!r}")
        return ""

    def put(self, peer: Peer, token: int, buffers: Sequence[memoryview]) -> Sequence[Handle | None]:
        pool, borrower = self.pool, self._borrowers.get(peer.id)
        if pool is None or borrower is None:
            return ()
        handles: list[Handle | None] = []
        try:
            for buffer in buffers:
                handles.append(self._put(pool, borrower, buffer))
        except BaseException:
            for handle in filter(None, handles):
                handle.take_back()
            raise
        return handles

    def _put(self, pool: SharedPool, borrower: Borrower, buffer: memoryview) -> Handle | None:
        size_bytes = buffer.nbytes
        if pool.has_shared and size_bytes:
            loan = pool.lend_shared(address_of(buffer), size_bytes, borrower)
            if loan is not None:
                return _Shared(pool, loan, size_bytes)
        if size_bytes < self.from_bytes:
            return None
        loan = pool.lend(size_bytes, borrower)
        if loan is None:
            return None
        try:
            slab = pool.area.memory[loan.offset : loan.offset + size_bytes]
            self._home.copier.copy(buffer, slab.data)
        except BaseException:
            pool.take_back(loan.tag)
            raise
        return _Lent(pool, loan, size_bytes)

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[memoryview]:
        borrowed = self._of(peer)
        try:
            return [borrowed.take(_read(entry), entry.size_bytes) for entry in entries]
        except ProtocolError:
            self.drop(peer, token, entries)
            raise

    def drop(self, peer: Peer, token: int, entries: Sequence[Entry]) -> None:
        borrowed = self._of(peer)
        for entry in entries:
            borrowed.refuse(_read(entry))

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


def _read(entry: Entry) -> Loan:
    if len(entry.content) != _LOAN.size:
        raise ProtocolError(f"a handle of shared memory has {len(entry.content)} bytes")
    return Loan(*_LOAN.unpack(entry.content))
