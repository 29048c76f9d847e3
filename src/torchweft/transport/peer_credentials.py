"""Finds the user of this machine at the other end of a connection.

Without a secret, any reader of the rendezvous store could join. So workers without a secret talk
only to their own user. The kernel names that user: for a Unix socket on request, for a TCP
connection within the machine in a table of all connections.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

from torchweft.errors import ProtocolError

_CREDENTIALS = struct.Struct("iII")  # process, user and group
_WORD = struct.Struct("=I")
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"
_NO_PROCESS = "0"
"""Inode of a connection that no process has, or has accepted; the table does not tell its user."""
_LOOKS = 10
"""Reads of the table, which is not a snapshot: a read may miss an entry while others connect."""


def check_user(connection: socket.socket) -> None:
    """Checks that this user, or root, has the other end of ``connection``.

    A TCP connection must have been accepted by now.

    Raises:
        ProtocolError: Another user has it.
        ConnectionError: The kernel does not name the user; a later attempt may succeed.
    """
    user = user_of(connection)
    if user is None:
        raise ConnectionError("without a secret, it must be known which user is at the other end")
    if user not in (0, os.geteuid()):
        raise ProtocolError(
            f"user {user} is at the other end, this worker is of user {os.geteuid()}; without a "
            "secret, workers talk to those of the same user only"
        )


def user_of(connection: socket.socket) -> int | None:
    """Returns the user of this machine at the other end; None if unknown.

    For a dialled Unix socket, that is the listener's user.
    """
    if connection.family != socket.AF_UNIX:
        return _user_of_tcp(connection)
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(data)[1]
    return user


def _user_of_tcp(connection: socket.socket) -> int | None:
    # The entry of the other end, which has its own address first.
    theirs = _written(connection.getpeername()), _written(connection.getsockname())
    for _ in range(_LOOKS):
        for local, remote, user in _connections():
            if (local, remote) in zip(*theirs, strict=True):
                return user
    return None


def _connections() -> Iterator[tuple[str, str, int]]:
    """Yields both ends and the user of each connection that a process has."""
    for table in _TABLES:
        try:
            with open(table) as lines:
                next(lines)
                for line in lines:
                    _, local, remote, state, *_, user, _, inode = line.split()[:10]
                    if state == _ESTABLISHED and inode != _NO_PROCESS:
                        yield local, remote, int(user)
        except FileNotFoundError:
            continue  # This machine has no IPv6, or no such table.


def _written(endpoint: tuple[str, int]) -> tuple[str, str]:
    """Returns an endpoint as the IPv4 table and as the IPv6 table write it."""
    host, port = endpoint[:2]
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", address)
    short = "" if mapped is None or mapped.version == 6 else _hexadecimal(mapped.packed)
    long = address if address.version == 6 else ipaddress.ip_address(f"::ffff:{address}")
    return f"{short}:{port:04X}", f"{_hexadecimal(long.packed)}:{port:04X}"


def _hexadecimal(packed: bytes) -> str:
    return "".join(f"{word:08X}" for (word,) in _WORD.iter_unpack(packed))
