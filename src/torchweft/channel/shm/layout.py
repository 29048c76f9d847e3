"""What is where in a worker's shared memory, and how it is mapped on either side.

::

    0          nonce, by which a peer knows that it was given the right memory
    4096       words, 8 bytes for each ticket
    2 MiB      slabs

A word is written by the borrower alone, in one aligned store, and read by the lender alone: the
tag of a loan once it has ended. A tag never comes again, so an old one means nothing.

The file is sealed against a change of its size: to touch what somebody has cut off would end the
process. It has the size of all that may ever be in use, and takes memory only where that has
been touched; what is idle is taken back by punching holes into it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

NONCE_BYTES = 16
WORDS_OFFSET = 4096
TICKET_BITS = 16
TICKET_COUNT = 1 << TICKET_BITS
TICKET_MASK = TICKET_COUNT - 1
SLABS_OFFSET = 2 << 20

_MADV_REMOVE = 9
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW
_F_GET_SEALS = 1034
_F_ADD_SEALS = 1033
_MFD_CLOEXEC = 1
_MFD_ALLOW_SEALING = 2

# Not mmap.madvise: that one holds the interpreter lock for all of the milliseconds.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A shared mapping, ended with the last array made of it.

    Not ``mmap.mmap``: that one keeps a descriptor of its own open.
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

    The mapping goes with the last array or tensor made of it.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.memory: Bytes = np.asarray(_Mapping(descriptor, size_bytes))
        self.words: Words = self.memory[WORDS_OFFSET : WORDS_OFFSET + 8 * TICKET_COUNT].view(
            np.uint64
        )
        self.address = int(self.memory.ctypes.data)
        self.size_bytes = size_bytes

    @property
    def nonce(self) -> bytes:
        """What the memory begins with."""
        return self.memory[:NONCE_BYTES].tobytes()

    def populate(self, offset: int, size_bytes: int) -> None:
        """Has the kernel back a range with pages, all of them, before anything is written.

        Raises:
            MemoryError: There are none left.
        """
        code = self._advise(offset, size_bytes, _MADV_POPULATE_WRITE)
        if code == errno.EINVAL:  # a kernel before 5.14
            self.memory[offset : offset + size_bytes : mmap.PAGESIZE] = 0
        elif code:
            raise MemoryError(f"no shared memory for {size_bytes} bytes: {os.strerror(code)}")

    def map_pages(self, offset: int, size_bytes: int) -> None:
        """Enters pages that are there into this process's page table, several at a time."""
        self._advise(offset, size_bytes, _MADV_POPULATE_READ)

    def punch(self, offset: int, size_bytes: int) -> None:
        """Gives a range's pages back to the system; its contents are zeros from then on."""
        self._advise(offset, size_bytes, _MADV_REMOVE)

    def _advise(self, offset: int, size_bytes: int, advice: int) -> int:
        code = _libc.madvise(self.address + offset, size_bytes, advice)
        return ctypes.get_errno() if code else 0


def create(size_bytes: int) -> tuple[int, Area]:
    """Makes shared memory for slabs of ``size_bytes`` in all; returns its descriptor too.

    Raises:
        OSError: The system has no such thing, or lets this process have none.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    descriptor = os.memfd_create("weft", _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SLABS_OFFSET + size_bytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
        area = Area(descriptor, SLABS_OFFSET + size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    area.memory[:NONCE_BYTES] = np.frombuffer(secrets.token_bytes(NONCE_BYTES), dtype=np.uint8)
    return descriptor, area


def attach(descriptor: int, nonce: bytes) -> Area:
    """Maps another process's shared memory.

    Args:
        descriptor: What the other process handed over; stays open.
        nonce: What the other process says that its memory begins with.

    Raises:
        OSError: It cannot be mapped, or is not what the other side said.
    """
    if fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError(errno.EPERM, "the memory is not sealed: it could be cut off under a reader")
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes <= SLABS_OFFSET:
        raise OSError(errno.EINVAL, f"{size_bytes} bytes are too few to hold anything")
    area = Area(descriptor, size_bytes)
    if not secrets.compare_digest(area.nonce, nonce):
        raise OSError(
            errno.EPERM, "the memory handed over is not the peer's: it has other contents"
        )
    return area
