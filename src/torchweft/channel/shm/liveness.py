"""Whether a process that once was connected is dead for certain.

A connection may end while the process at its other end lives on and still uses memory that it
was lent. Only a dead process certainly does not. Ids are used again, so the time at which the
process started is noted as well.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import NamedTuple

PROCESSES = Path("/proc")

_CREDENTIALS = struct.Struct("3i")
_DEAD = ("Z", "X")


class Process(NamedTuple):
    """A process as this one sees it; ``pid`` is 0 where it does not see it."""

    pid: int
    started: str

    def is_dead(self) -> bool:
        """Whether the process is gone for certain; False also where this cannot be known."""
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
    """Returns the state and the time of start; empty texts if there is no such process."""
    try:
        text = (PROCESSES / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return "", ""
    # The name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
