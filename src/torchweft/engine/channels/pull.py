"""The channel ``cma``: the receiver copies straight out of the sender's memory.

The kernel allows cross-memory attach between processes of one user that see each other's ids. Yama,
a container's seccomp filter or a missing capability may forbid it. No set of facts predicts that
reliably. So each side offers a nonce in its memory when it connects, and the other proves that it
can read it. Reading may be permitted in one direction only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import struct
from collections.abc import Sequence

from torch import Tensor

from torchweft import knobs
from torchweft.engine.channels.channel import CannotGet, Channel, Entry, Handle, Home, Meeting, Peer
from torchweft.engine.channels.memory import address_of
from torchweft.engine.codec.tensors import as_memory
from torchweft.errors import ProtocolError

NONCE_BYTES = 16
_ADDRESS = struct.Struct("<Q")

_libc = ctypes.CDLL(None, use_errno=True)
_REASONS = {
    errno.EPERM: "the kernel does not permit it (see ptrace(2), access mode)",
    errno.ESRCH: "no such process",
    errno.EFAULT: "nothing is mapped there",
    errno.ENOSYS: "the kernel, or a filter, has no such call",
}


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


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


def pull(pid: int, address: int, into: memoryview) -> None:
    """Copies from another process's memory, blocking, without holding the interpreter lock.

    Args:
        pid: The process to read from.
        address: Start address in its memory.
        into: Writable, contiguous memory here; filled completely.

    Raises:
        OSError: Some bytes could not be read; the contents of ``into`` are undefined.
    """
    if unavailable:
        raise _error(errno.ENOSYS, pid, address, into.nbytes)
    target, size_bytes = address_of(into) if into.nbytes else 0, into.nbytes
    # One call moves at most 2 GiB, and less where it meets a page that it cannot read.
    while size_bytes:
        here, there = _Range(target, size_bytes), _Range(address, size_bytes)
        count = _libc.process_vm_readv(pid, here, 1, there, 1, 0)
        if count <= 0:
            raise _error(ctypes.get_errno() if count else errno.EFAULT, pid, address, size_bytes)
        address, target, size_bytes = address + count, target + count, size_bytes - count


def _error(code: int, pid: int, address: int, size_bytes: int) -> OSError:
    reason = _REASONS.get(code, os.strerror(code))
    text = f"cannot read {size_bytes} bytes at {address:#x} of process {pid}: {reason}"
    return OSError(code, text)


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


class Pull(Channel):
    """Tensors that the receiver copies out of the sender's memory, which is kept until then.

    Nothing is copied before: writing to the memory before the pull changes the data that the peer
    gets, as with any send that has not completed.
    """

    name, number = "cma", 2

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.from_bytes = knobs.CMA_FROM_BYTES.get()
        self._nonce = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES)
        self._pids: dict[int, int] = {}
        """The processes that are proven to be peers."""

    def describe(self) -> dict[str, object]:
        return {"address": ctypes.addressof(self._nonce), "nonce": self._nonce.raw.hex()}

    def accept(self, peer: Peer, meeting: Meeting) -> str:
        obstacle = _obstacle(meeting)
        if not obstacle:
            self._pids[peer.id] = meeting.there.pid
        return obstacle

    def put(self, peer: Peer, token: int, buffers: Sequence[Tensor]) -> Sequence[Handle | None]:
        # The view of the memory, unlike the tensor, keeps a program from resizing its storage.
        return [
            Handle(_ADDRESS.pack(buffer.data_ptr()), buffer.nbytes, as_memory(buffer))
            if buffer.nbytes >= self.from_bytes
            else None
            for buffer in buffers
        ]

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[memoryview]:
        pid = self._pids.get(peer.id)
        if pid is None:
            if peer.is_over:
                raise peer.lost_error()
            raise ProtocolError(f"worker {peer.name!r} wants its memory to be read, which fails")
        pulled = []
        for entry in entries:
            if len(entry.content) != _ADDRESS.size:
                raise ProtocolError(f"an address has {len(entry.content)} bytes")
            buffer = self._home.pool.lease(entry.size_bytes)
            try:
                pull(pid, _ADDRESS.unpack(entry.content)[0], buffer)
            except OSError as error:
                raise CannotGet(str(error)) from error
            pulled.append(buffer)
        return pulled

    def lost(self, peer: Peer) -> None:
        self._pids.pop(peer.id, None)


def _obstacle(meeting: Meeting) -> str:
    """Returns why this process cannot pull from the peer, in the user's terms."""
    here, there = meeting.here, meeting.there
    address, text = meeting.told.get("address"), meeting.text("nonce")
    if not isinstance(address, int) or not 0 <= address < 1 << 64:
        raise ProtocolError(f"a peer's nonce lies at {address!r}, which is no address")
    if unavailable:
        return unavailable
    if not meeting.is_one_host:
        return f"the peer is on another host ({there.hostname})"
    if not here.pid_namespace or here.pid_namespace != there.pid_namespace:
        return "the peer is in another process namespace, as in another container"
    if here.uid != there.uid:
        return f"the peer runs as user {there.uid}, this process as user {here.uid}"
    try:
        nonce = bytes.fromhex(text)
    except ValueError:
        return "the peer's nonce is malformed"
    return find_obstacle(there.pid, address, nonce)
