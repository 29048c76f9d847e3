"""Addresses of workers, with the text form that travels in the directory of the group."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import socket
from typing import NamedTuple

from torchweft.errors import ConfigurationError
from torchweft.probe import is_loopback


class UnixAddress(NamedTuple):
    """A Unix socket in the abstract namespace: no file is left behind by a process that dies."""

    name: str

    def __str__(self) -> str:
        return f"unix:@{self.name}"


class TcpAddress(NamedTuple):
    """A TCP endpoint; a secure one speaks TLS."""

    host: str
    port: int
    is_secure: bool = False

    def __str__(self) -> str:
        return f"{_SCHEMES[self.is_secure]}:{self.host}:{self.port}"


_SCHEMES = ("tcp", "tls")
LOOPBACK = "127.0.0.1"
_LISTENS = "00010000"
"""Flags of a listening socket in the kernel's table."""
_OF_WORKER = re.compile("@weft-[0-9a-f]{32}")


Address = UnixAddress | TcpAddress


def parse(text: str) -> Address:
    """Parses the text that ``str(address)`` returned."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith("@"):
        return UnixAddress(rest[1:])
    host, _, port = rest.rpartition(":")
    if scheme in _SCHEMES and host and port.isdecimal() and int(port) <= 0xFFFF:
        return TcpAddress(host, int(port), scheme == _SCHEMES[True])
    raise ConfigurationError(f"{text!r} is no address; one looks like tcp:127.0.0.1:4000")


def listen_unix() -> tuple[socket.socket, UnixAddress]:
    """Opens a listening socket under an unguessable name."""
    address = UnixAddress(f"weft-{secrets.token_hex(16)}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{address.name}")
    listener.listen(1024)
    return listener, address


def is_far(address: Address) -> bool:
    """Whether other machines can reach an address."""
    return isinstance(address, TcpAddress) and not is_loopback(address.host)


def is_unspecified(host: str) -> bool:
    """Whether ``host`` stands for all addresses of this machine, as 0.0.0.0 does."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def listen_tcp(host: str, *, is_secure: bool = False) -> tuple[socket.socket, TcpAddress]:
    """Opens a listening socket on a free port of ``host``.

    Raises:
        ConfigurationError: This machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host!r}: {error}; choose an address of this machine, "
            "or leave the option out to listen on loopback"
        ) from error
    return listener, TcpAddress(host, listener.getsockname()[1], is_secure)


def dial(address: Address, timeout_s: float) -> socket.socket:
    """Connects to ``address``; raises OSError without an answer within ``timeout_s`` seconds."""
    if isinstance(address, TcpAddress):
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
        tune(connection)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(f"\0{address.name}")
    except OSError:
        connection.close()
        raise
    return connection


def tune(connection: socket.socket) -> None:
    """Sets the options of a connected socket that do not depend on what it carries.

    Within one machine congestion control has nothing to control. An algorithm that paces, such as
    BBR, halves the throughput there: 16 MiB at 3.4 GB/s, with Reno at 5.9. Every Linux has Reno
    and lets any process choose it. Between machines the system's own choice stays.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):
        if connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def unix_listeners() -> list[UnixAddress]:
    """Returns the addresses of all workers of this host that listen on Unix sockets.

    They may be of other users, and of any group. Only those in this network namespace are found.
    """
    try:
        with open("/proc/net/unix") as table:
            lines = [line.split() for line in table]
    except OSError:
        return []
    names = {line[-1] for line in lines if len(line) == 8 and line[3] == _LISTENS}
    return [UnixAddress(name[1:]) for name in sorted(names) if _OF_WORKER.fullmatch(name)]
