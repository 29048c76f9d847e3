"""The host, the namespaces, the cores and the addresses of this process.

Two workers exchange these facts when they connect and decide from them how memory can travel
between them. Everything here is a plain value that survives JSON, and is read from the system
without touching a device: nothing is initialised, and torch is not imported. A fact that the
system does not tell is empty, 0 or -1, and equals no other worker's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchweft.errors import ProtocolError

LOAD = "/proc/loadavg"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")
_ANY_PORT = 9
_FAR_AWAY = "192.0.2.1"
"""An address that no machine has: it is reserved for documentation."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The place of one process, from which its peer decides whether it can read the memory there.

    Attributes:
        boot_id: Identifies one boot of one kernel; empty if the system has none.
        hostname: As the process sees it; containers of one host differ.
        pid: In the process's own namespace.
        uid: Effective user id; -1 if the system has no users.
        pid_namespace: Inode of the process id namespace, or 0.
    """

    boot_id: str
    hostname: str
    pid: int
    uid: int
    pid_namespace: int

    def as_json(self) -> dict[str, object]:
        """Returns the facts as a dictionary that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Facts:
        """Reads what ``as_json`` wrote.

        Raises:
            ProtocolError: A fact is missing or has the wrong type.
        """
        if not isinstance(data, dict):
            raise ProtocolError(f"facts about a process are a {type(data).__name__}, not an object")
        values: dict[str, Any] = {each.name: data.get(each.name) for each in fields(cls)}
        for each in fields(cls):
            value = values[each.name]
            if type(value).__name__ != each.type:
                raise ProtocolError(
                    f"a process describes its {each.name} as {value!r}, which is no {each.type}"
                )
        return cls(**values)


def network_id() -> str:
    """Returns an id of this process's network stack, which loopback reaches; empty if unknown.

    Processes in containers of one host may have one stack each.
    """
    boot_id, namespace = _read_text(BOOT_ID), _inode(NAMESPACES / "net")
    return f"{boot_id}/{namespace}" if boot_id else ""


def clock_id() -> str:
    """Returns an id of this process's monotonic clock; empty if unknown.

    Processes with the same id read the same time from ``time.monotonic``.
    """
    boot_id, namespace = _read_text(BOOT_ID), _inode(NAMESPACES / "time")
    return f"{boot_id}/{namespace}" if boot_id else ""


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_address_towards(host: str) -> str:
    """Returns this machine's address on the route to ``host``; empty if there is no route.

    Nothing is sent. A name of this machine may stand for loopback here (/etc/hosts) and for a
    network address elsewhere. Then the address of the default route is returned, if there is one.
    """
    address = _source_address(host)
    if address and is_loopback(address) and not is_loopback(host):
        return _source_address(_FAR_AWAY) or address
    return address


def _source_address(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as asking:
            asking.connect(place)
            return str(asking.getsockname()[0])
    return ""


def read_facts() -> Facts:
    """Reads the facts about this process as they are now; call it again after a fork."""
    return Facts(
        boot_id=_read_text(BOOT_ID),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        uid=os.geteuid() if hasattr(os, "geteuid") else -1,
        pid_namespace=_inode(NAMESPACES / "pid"),
    )


def usable_cores() -> frozenset[int]:
    """Returns the cores that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def running_threads() -> int:
    """Counts the threads of the machine that run or wait for a core, this one included.

    Returns 0 if the system does not tell. Takes about 10 us.
    """
    try:
        descriptor = os.open(LOAD, os.O_RDONLY)
        try:
            text = os.read(descriptor, 64)
        finally:
            os.close(descriptor)
        return int(text.split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0
