"""Tells whether a process that once was connected is certainly dead.

A connection may end while the process at its other end lives on and still uses borrowed memory.
Only a dead process certainly does not. Process ids are reused, so the start time is recorded as
well.
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
