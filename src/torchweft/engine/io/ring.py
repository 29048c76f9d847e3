"""The memory of a ring, which carries the data between two processes of one host.

A message through a socket takes a system call at both ends. Two processes of one host share memory
instead: a ring of bytes for each direction, which ``native/ring.c`` writes and reads. Their socket
remains: a byte on it wakes a side that sleeps, and its end is the end of the peer.

The acceptor of a connection makes the memory and hands it over with its greeting, where both sides
offer a ring. The dialler tells in its last greeting whether it has mapped the memory. Otherwise
the connection goes on without a ring. A strict worker offers none, as its peer could write to the
memory at any time, and neither does the plain twin.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RING_BYTES = 1 << 19
"""Bytes that wait in one direction: a message with its tensors."""
MEMORY_BYTES = 2 * (256 + RING_BYTES)
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # No more seals, no other size: access beyond the end would end the process.


class Ring(NamedTuple):
    """One side's memory of both directions.

    Attributes:
        memory: The memory, which the peer has as well.
        is_first: Whether this side writes the first direction; the peer says the opposite.
    """

    memory: mmap.mmap
    is_first: bool


def create_sealed(name: str, size_bytes: int) -> int:
    """Returns the descriptor of new memory to hand over, whose size nobody can change.

    Raises:
        OSError: The system has no such memory, or denies it to this process.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    descriptor = os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sealed_size(descriptor: int) -> int:
    """Returns the size of memory that a peer has handed over; raises OSError if it may change."""
    if fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError(errno.EPERM, "the memory is not sealed: it could be cut off under a reader")
    return os.fstat(descriptor).st_size


def _map(descriptor: int, *, is_first: bool) -> Ring:
    """Maps memory; raises OSError if it is no ring's."""
    if sealed_size(descriptor) != MEMORY_BYTES:
        raise OSError(errno.EINVAL, "the memory of a ring has another size")
    if sys.version_info >= (3, 13):
        return Ring(mmap.mmap(descriptor, MEMORY_BYTES, trackfd=False), is_first)
    return Ring(mmap.mmap(descriptor, MEMORY_BYTES), is_first)


@contextlib.contextmanager
def offer(*, is_wanted: bool) -> Iterator[tuple[Ring | None, Sequence[int]]]:
    """Yields a new ring and the descriptors to hand over; none where the system refuses that."""
    made: tuple[Ring | None, Sequence[int]] = None, ()
    descriptor = -1
    with contextlib.suppress(OSError, ValueError):
        if is_wanted:
            descriptor = create_sealed("weft-ring", MEMORY_BYTES)
            made = _map(descriptor, is_first=True), (descriptor,)
    try:
        yield made
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def take(descriptors: list[int]) -> Ring | None:
    """Takes the last descriptor that came with a greeting; None if it is no ring's memory."""
    with contextlib.suppress(OSError, ValueError):
        return _map(descriptors[-1], is_first=False) if descriptors else None
    return None
