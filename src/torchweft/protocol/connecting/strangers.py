"""Decides which unauthenticated connections a worker serves, and which one has to go.

Any host can open connections, and each occupies a thread until it is authenticated. A connection
that has to go occupies its thread a while longer: until the thread notices. So connections and
threads are counted separately, and a connection waits, unread, until a thread is free for it.

The latest connection is the first to get a thread. If connections come faster than threads become
free, the oldest waiting ones go unserved. Served in their order, each would get its thread just
before it had to go, and no group member would get in.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

C = TypeVar("C")
"""A connection, as the shell knows it; hashable."""


class Admission(enum.Enum):
    """What to do with a connection."""

    BEGIN = enum.auto()
    """Have a thread authenticate it, and call ``ended`` afterwards."""
    TURN_OUT = enum.auto()
    """End it, so that its thread notices and closes it."""
    CLOSE = enum.auto()
    """Close it: no thread serves it."""


Admissions = list[tuple[Admission, C]]
"""What to do with which connections, in order."""


class Strangers(Generic[C]):
    """The unauthenticated connections of one worker.

    At most ``limit`` connections are open, and at most ``limit`` threads serve them. Beyond the
    limit the oldest connection goes: a group member completes the handshake within moments. Methods
    return what to do, in order. Not thread-safe.

    Args:
        limit: How many connections there may be at once; at least 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[C, None] = {}
        """Connections that have not been told to go, the oldest first."""
        self._waiting: list[C] = []
        """Those of them that no thread serves yet, the oldest first."""
        self._served: set[C] = set()
        """Connections that occupy a thread, even if they have been told to go."""
        self._is_closed = False

    def came(self, connection: C) -> Admissions[C]:
        """Takes a new connection."""
        if self._is_closed:
            return [(Admission.CLOSE, connection)]
        gone = [self._let_go(next(iter(self._open)))] if len(self._open) >= self._limit else []
        self._open[connection] = None
        self._waiting.append(connection)
        return [*gone, *self._begin()]

    def ended(self, connection: C) -> Admissions[C]:
        """Notes that the thread of a connection has authenticated it, or has closed it."""
        self._served.discard(connection)
        self._open.pop(connection, None)
        return self._begin()

    def close(self) -> Admissions[C]:
        """Lets all connections go, and later ones as well."""
        self._is_closed = True
        return [self._let_go(connection) for connection in list(self._open)]

    def _let_go(self, connection: C) -> tuple[Admission, C]:
        del self._open[connection]
        if connection in self._served:
            return Admission.TURN_OUT, connection
        self._waiting.remove(connection)
        return Admission.CLOSE, connection

    def _begin(self) -> Admissions[C]:
        begun: Admissions[C] = []
        while self._waiting and len(self._served) < self._limit:
            connection = self._waiting.pop()
            self._served.add(connection)
            begun.append((Admission.BEGIN, connection))
        return begun
