"""The receiver's side of shared memory: tensors that are another process's slabs.

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
import threading
import weakref

from torchweft.channel.memory import Bytes
from torchweft.channel.shm.layout import SLABS_OFFSET, TICKET_MASK, Area, Words
from torchweft.channel.table import BufferEntry
from torchweft.errors import ProtocolError


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

    def take(self, entry: BufferEntry) -> memoryview:
        """Returns the memory of a buffer, writable; the loan ends with its last view.

        Raises:
            ProtocolError: The buffer lies outside the slabs.
        """
        start, end = entry.place, entry.place + entry.size_bytes
        if not SLABS_OFFSET <= start < end <= self._area.size_bytes:
            raise ProtocolError(
                f"{self._peer} lends bytes {start} to {end} of its shared memory, which has slabs "
                f"from {SLABS_OFFSET} to {self._area.size_bytes}"
            )
        self._map(start, entry.size_bytes)
        exporter = self._area.memory[start:end]
        lease = _Lease(exporter, _end)
        lease.words, lease.tag = self._area.words, entry.tag
        _leases[id(lease)] = lease
        return exporter.data

    def refuse(self, entry: BufferEntry) -> None:
        """Ends the loan of a buffer that will not be read."""
        self._area.words[entry.tag & TICKET_MASK] = entry.tag

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
