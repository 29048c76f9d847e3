"""Lends this worker's shared memory to one peer."""

from __future__ import annotations

from torchweft.channel.cma import address_of
from torchweft.channel.copying import Copier
from torchweft.channel.shm.liveness import Process
from torchweft.channel.shm.pool import Borrower, Loan, SharedPool
from torchweft.channel.table import SHM, BufferEntry


class Lender:
    """Puts buffers for one peer into shared memory. Thread-safe.

    Args:
        pool: This worker's memory, which the peer has mapped.
        process: The peer's process.
    """

    def __init__(self, pool: SharedPool, process: Process) -> None:
        self._pool = pool
        self._borrower = Borrower(process)

    @property
    def has_shared(self) -> bool:
        """Whether the user shares any memory."""
        return self._pool.has_shared

    def put(self, buffer: memoryview, copier: Copier) -> BufferEntry | None:
        """Copies a buffer into a slab for the peer; returns None if there is no slab for it."""
        loan = self._pool.lend(buffer.nbytes, self._borrower)
        if loan is None:
            return None
        slab = self._pool.area.memory[loan.offset : loan.offset + buffer.nbytes]
        try:
            copier.copy(buffer, slab.data)
        except BaseException:
            self._pool.take_back(loan.tag)
            raise
        return _entry(loan, buffer)

    def pass_on(self, buffer: memoryview) -> BufferEntry | None:
        """Lends a buffer that the user shares, without a copy; returns None for other buffers."""
        if not buffer.nbytes or not self._pool.has_shared:
            return None
        loan = self._pool.lend_shared(address_of(buffer), buffer.nbytes, self._borrower)
        return None if loan is None else _entry(loan, buffer)

    def take_back(self, entry: BufferEntry) -> None:
        """Ends the loan of an entry that was never sent to the peer."""
        self._pool.take_back(entry.tag)

    def lose(self) -> None:
        """Takes back the peer's loans as soon as the peer can no longer use them."""
        self._pool.lose(self._borrower)


def _entry(loan: Loan, buffer: memoryview) -> BufferEntry:
    return BufferEntry(SHM, buffer.nbytes, loan.offset, loan.tag)
