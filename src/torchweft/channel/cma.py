"""Cross-memory attach: the receiver copies straight out of the sender's memory.

``process_vm_readv`` copies between two address spaces in one system call, and ctypes lets other
Python threads run meanwhile. The kernel allows it between processes of one user that see each
other's ids. Yama, a container's seccomp filter or a missing capability may forbid it. No set of
facts predicts that reliably. So each side offers a nonce in its memory when it connects, and the
other proves that it can read it.

The cost is pinning the sender's pages, about 0.2 us each, more than copying them. Pinning gains
from a second thread if a core is free (16 MiB: 13 GB/s with one thread, 20 with two); see
``copying``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets

import numpy as np

from torchweft.errors import WeftError

NONCE_BYTES = 16


class PullError(WeftError, OSError):
    """Another process's memory could not be read.

    Attributes:
        pid: The process.
        address: The address in its memory.
        size_bytes: Number of bytes still missing.
    """

    def __init__(self, code: int, text: str, pid: int, address: int, size_bytes: int) -> None:
        super().__init__(code, text)
        self.pid = pid
        self.address = address
        self.size_bytes = size_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (*self.args, self.pid, self.address, self.size_bytes))


class PullRefused(PullError, PermissionError):
    """The kernel does not permit the pull, and will not permit the next one either."""


class SourceGone(PullError, ProcessLookupError):
    """The process no longer exists."""


class SourceAddressInvalid(PullError):
    """The process has nothing mapped at that address."""


_ERROR_TYPES: dict[int, tuple[type[PullError], str]] = {
    errno.EPERM: (PullRefused, "the kernel does not permit it (see ptrace(2), access mode)"),
    errno.ESRCH: (SourceGone, "no such process"),
    errno.EFAULT: (SourceAddressInvalid, "nothing is mapped there"),
    errno.ENOSYS: (PullRefused, "the kernel, or a filter, has no such call"),
}


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
unavailable = "" if hasattr(_libc, "process_vm_readv") else "this system has no process_vm_readv"
"""Why this process cannot pull from any other; empty if it can."""

if not unavailable:
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.POINTER(_Range),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


def address_of(buffer: memoryview) -> int:
    """Returns the start address of contiguous, non-empty memory."""
    if buffer.readonly:
        # numpy takes 1.1 us. ctypes takes 0.2 us but requires writable memory.
        return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def pull(pid: int, address: int, into: memoryview) -> None:
    """Copies from another process's memory, blocking, without holding the interpreter lock.

    Args:
        pid: The process to read from.
        address: Start address in its memory.
        into: Writable, contiguous memory here; filled completely.

    Raises:
        PullError: Some bytes could not be read; the contents of ``into`` are undefined.
    """
    if into.nbytes:
        pull_range(pid, address, address_of(into), into.nbytes)


def pull_range(pid: int, source: int, target: int, size_bytes: int) -> None:
    """Does the same as ``pull`` with addresses, which must be valid."""
    if unavailable:
        raise _error(errno.ENOSYS, pid, source, size_bytes)
    # One call moves at most 2 GiB, and less where it meets a page that it cannot read.
    while size_bytes:
        here, there = _Range(target, size_bytes), _Range(source, size_bytes)
        count = _libc.process_vm_readv(pid, here, 1, there, 1, 0)
        if count <= 0:
            raise _error(ctypes.get_errno() if count else errno.EFAULT, pid, source, size_bytes)
        source, target, size_bytes = source + count, target + count, size_bytes - count


def _error(code: int, pid: int, address: int, size_bytes: int) -> PullError:
    error_type, reason = _ERROR_TYPES.get(code, (PullError, os.strerror(code)))
    text = f"cannot read {size_bytes} bytes at {address:#x} of process {pid}: {reason}"
    return error_type(code, text, pid, address, size_bytes)


class Nonce:
    """Random bytes at a fixed address, for a peer to prove that it can read this process.

    Keep it alive for as long as a peer may read it.
    """

    def __init__(self) -> None:
        self.value = secrets.token_bytes(NONCE_BYTES)
        self._memory = ctypes.create_string_buffer(self.value, NONCE_BYTES)
        self.address = ctypes.addressof(self._memory)


def find_obstacle(pid: int, address: int, expected: bytes) -> str:
    """Reads another process's nonce; returns why it cannot be pulled from, empty if it can.

    An id from another namespace may belong to a different process here; then the bytes found differ
    from ``expected``.
    """
    found = memoryview(bytearray(NONCE_BYTES))
    try:
        pull(pid, address, found)
    except OSError as error:
        return str(error.strerror)
    if not secrets.compare_digest(bytes(found), expected):
        return f"process {pid} here is not the peer: its memory has other contents"
    return ""
