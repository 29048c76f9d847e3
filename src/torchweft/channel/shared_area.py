"""A worker's shared memory as the kernel has it: layout, mappings, memory left, dead borrowers.

::

    0          nonce, by which a peer checks that it was given the right memory
    4096       words, 8 bytes for each ticket
    2 MiB      slabs

Only the borrower writes a word, in one aligned store, and only the lender reads it. The word is the
tag of a loan that has ended. Tags are never reused, so an old tag means nothing.

The file is sealed against a change of its size: touching a truncated part would end the process.
Its size is the most that may ever be in use, and it takes memory only where it was touched. Idle
memory is given back by punching holes into it.

Shared memory is charged to the container's limit as it is touched, and there is no error at the
limit: the kernel kills a process of the container. So the memory left is looked up beforehand.

A connection may end while the process at its other end lives on and still uses borrowed memory.
Only a dead process certainly does not. Process ids are reused, so the start time is recorded as
well.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchweft.channel.memory import MADV_POPULATE_WRITE, Bytes, madvise

Words = npt.NDArray[np.uint64]

NONCE_BYTES = 16
WORDS_OFFSET = 4096
TICKET_BITS = 16
TICKET_COUNT = 1 << TICKET_BITS
TICKET_MASK = TICKET_COUNT - 1
SLABS_OFFSET = 2 << 20

_MADV_REMOVE = 9
_MADV_POPULATE_READ = 22
_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW
_F_GET_SEALS = 1034
_F_ADD_SEALS = 1033
_MFD_CLOEXEC = 1
_MFD_ALLOW_SEALING = 2

_libc = ctypes.CDLL(None, use_errno=True)
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
        self.words: Words = self.memory[WORDS_OFFSET : WORDS_OFFSET + 8 * TICKET_COUNT].view(
            np.uint64
        )
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
        code = self._advise(offset, size_bytes, MADV_POPULATE_WRITE)
        if code == errno.EINVAL:  # a kernel before 5.14
            self.memory[offset : offset + size_bytes : mmap.PAGESIZE] = 0
        elif code:
            raise MemoryError(f"no shared memory for {size_bytes} bytes: {os.strerror(code)}")

    def map_pages(self, offset: int, size_bytes: int) -> None:
        """Enters existing pages into this process's page table, several at a time."""
        self._advise(offset, size_bytes, _MADV_POPULATE_READ)

    def punch(self, offset: int, size_bytes: int) -> None:
        """Gives a range's pages back to the system; its contents are zeros from then on."""
        self._advise(offset, size_bytes, _MADV_REMOVE)

    def _advise(self, offset: int, size_bytes: int, advice: int) -> int:
        return madvise(self.address + offset, size_bytes, advice)


def create(size_bytes: int) -> tuple[int, Area]:
    """Returns new shared memory for ``size_bytes`` of slabs, and its descriptor.

    Raises:
        OSError: The system has no such memory, or denies it to this process.
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
        descriptor: The descriptor that the other process handed over; stays open.
        nonce: The first bytes of the memory according to the other process.

    Raises:
        OSError: It cannot be mapped, or is not the memory that the other side described.
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


# What the kernel tells of memory and processes

MEMINFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

_NO_LIMIT = sys.maxsize
PROCESSES = Path("/proc")

_CREDENTIALS = struct.Struct("3i")
_DEAD = ("Z", "X")


def available_bytes() -> int:
    """Returns how much memory is left, by the machine and by every limit that applies."""
    return min(_on_machine(MEMINFO), *_within_limits(OWN_GROUPS, GROUPS), _NO_LIMIT)


def _on_machine(meminfo: Path) -> int:
    for line in _text(meminfo).splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return _NO_LIMIT


def _within_limits(own_groups: Path, groups: Path) -> Iterator[int]:
    for line in _text(own_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(root, path, *names)


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Yields the memory left in a control group and in each visible ancestor of it."""
    group = root / path.lstrip("/")
    for each in (group, *group.parents):
        limit_bytes = _number(each / limit)
        if limit_bytes is not None:
            used_bytes = _number(each / usage) or 0
            yield max(limit_bytes - used_bytes + _statistic(each, reclaimable), 0)
        if each == root:
            return


def _statistic(group: Path, name: str) -> int:
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None  # "max" means no limit


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


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
    options = (socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid = _CREDENTIALS.unpack(connection.getsockopt(*options))[0]
    return process(pid)


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
