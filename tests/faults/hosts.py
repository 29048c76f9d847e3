"""A private network and private shared memory of this process, with an address for each worker.

Removing an address acts like pulling a cable: nothing arrives, and no error is reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
from pathlib import Path

from torchweft.engine.io import addresses
from torchweft.engine.io.addresses import Address, TcpAddress

_NEW_NETWORK, _NEW_MOUNTS, _NEW_USERS = 0x40000000, 0x00020000, 0x10000000
_PRIVATE, _RECURSIVE = 1 << 18, 1 << 14
_LIMIT_S = 10.0


def isolate() -> str:
    """Gives this process, which must have one thread, a network of its own.

    Returns:
        Why that is impossible, or an empty string.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _NEW_NETWORK | _NEW_MOUNTS | (_NEW_USERS if user else 0)
    if libc.unshare(flags):
        return os.strerror(ctypes.get_errno())
    try:
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _run_ip("link", "set", "lo", "up")
        for rank in range(_MOST_WORKERS):
            plug_in(rank)
    except OSError as error:
        return str(error)
    # Files that other programs leave in the common one are not this program's fault.
    libc.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None)
    libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None)
    return ""


_MOST_WORKERS = 5


def address_of(rank: int) -> str:
    """Returns the address of a worker."""
    return f"198.18.77.{rank + 1}"


def plug_in(rank: int) -> None:
    """Adds a worker's address to the network, if it is missing."""
    with contextlib.suppress(FileExistsError):
        _run_ip("addr", "add", f"{address_of(rank)}/32", "dev", "lo")


def unplug(rank: int) -> None:
    """Removes a worker's address from the network, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        _run_ip("addr", "del", f"{address_of(rank)}/32", "dev", "lo")


def dial_from(rank: int) -> None:
    """Makes this process dial from a worker's address."""
    dial = addresses.dial

    def dial_bound(address: Address, timeout_s: float) -> socket.socket:
        if not isinstance(address, TcpAddress):
            return dial(address, timeout_s)
        connection = socket.create_connection(
            (address.host, address.port), timeout_s, source_address=(address_of(rank), 0)
        )
        addresses.tune(connection)
        return connection

    addresses.dial = dial_bound


def _run_ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_LIMIT_S)
    if "File exists" in done.stderr or "already assigned" in done.stderr:
        raise FileExistsError(done.stderr)
    if "Address not found" in done.stderr or "Cannot assign" in done.stderr:
        raise FileNotFoundError(done.stderr)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
