"""What the kernel tells of memory and processes: how much is left, and whether a borrower is dead.

Shared memory is charged to the container's limit as it is touched, and there is no error at the
limit: the kernel kills a process of the container. So the memory left is looked up beforehand.

A connection may end while the process at its other end lives on and still uses borrowed memory.
Only a dead process certainly does not. Process ids are reused, so the start time is recorded as
well.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
