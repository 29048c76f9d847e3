"""Decides which unauthenticated connections a worker serves, and which one has to go.

Any host can open connections, and each occupies a thread until it is authenticated. A connection
that has to go occupies its thread a while longer: until the thread notices. So connections and
threads are counted separately, and a connection waits, unread, until a thread is free for it.

A member's connection brings a *voucher* in its first bytes. It is served at once, and keeps its
place. All others are strangers'. A voucher counts once, so that a copy of it is a stranger's.

The latest stranger is the first to get a thread. If connections come faster than threads become
free, the oldest waiting ones go unserved. In the order of arrival, each would get its thread just
before it had to go. Then no observer, and no member whose voucher is late, would get in. The next
stranger is served only when all connections that are ready have come, and when the thread of the
previous one has begun. So in a flood most strangers are closed, which costs little.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")
"""A connection, as the shell knows it; hashable."""

REMEMBERED = 1 << 14
"""Numbers of vouchers that a worker remembers, to recognize copies."""


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

    At most ``limit`` connections without a voucher are open, and at most ``limit`` threads serve
    them. Beyond the limit the oldest one goes. Connections with a voucher have ``limit`` places and
    threads of their own; beyond these, a voucher does not count. Methods return what to do, in
    order. Not thread-safe.

    Args:
        limit: How many connections of each kind there may be at once; at least 1.
        look: Returns the number of the valid voucher that has arrived on a connection, or None. It
            is called only before ``heard`` has been, when nobody reads the connection.
    """

    def __init__(self, limit: int, look: Callable[[C], bytes | None]) -> None:
        self._limit = limit
        self._look = look
        self._members: set[C] = set()
        """Connections with a voucher; each occupies a thread."""
        self._are_more_ready = False
        self._beginning: C | None = None
        """The stranger's connection whose thread has yet to begin."""
        self._open: dict[C, None] = {}
        """Other connections that have not been told to go, the oldest first."""
        self._silent: set[C] = set()
        """Those of them whose first bytes no thread has seen."""
        self._waiting: list[C] = []
        """Those of them that no thread serves yet, the oldest first."""
        self._served: set[C] = set()
        """Strangers' connections that occupy a thread, even if they have been told to go."""
        self._numbers: dict[bytes, None] = {}
        """The numbers of the latest vouchers, the oldest first."""
        self._is_closed = False

    def came(self, connection: C) -> Admissions[C]:
        """Takes a new connection; ``all_came`` must follow when no more connections are ready."""
        if self._is_closed:
            return [(Admission.CLOSE, connection)]
        if self._brings_voucher(connection):
            self._members.add(connection)
            return [(Admission.BEGIN, connection)]
        self._are_more_ready = True
        done: Admissions[C] = []
        while len(self._open) >= self._limit:
            oldest = next(iter(self._open))
            if oldest in self._silent and self._brings_voucher(oldest):
                done += self._take_for_member(oldest)
            else:
                done.append(self._let_go(oldest))
        self._open[connection] = None
        self._silent.add(connection)
        self._waiting.append(connection)
        return done

    def all_came(self) -> Admissions[C]:
        """Notes that no more connections are ready."""
        self._are_more_ready = False
        return self._serve()

    def began(self, connection: C) -> Admissions[C]:
        """Notes that the thread of a connection has begun."""
        if connection == self._beginning:
            self._beginning = None
        return self._serve()

    def heard(self, connection: C) -> Admissions[C]:
        """Notes that the first bytes of a connection are there, which its thread reads next."""
        if connection not in self._silent:
            return []
        self._silent.remove(connection)
        if not self._brings_voucher(connection):
            return []
        return [*self._take_for_member(connection), *self._serve()]

    def ended(self, connection: C) -> Admissions[C]:
        """Notes that the thread of a connection has authenticated it, or is about to close it."""
        self._members.discard(connection)
        self._served.discard(connection)
        self._silent.discard(connection)
        self._open.pop(connection, None)
        return self._serve()

    def close(self) -> Admissions[C]:
        """Lets all connections go, and later ones as well."""
        self._is_closed = True
        members = [(Admission.TURN_OUT, connection) for connection in self._members]
        return members + [self._let_go(connection) for connection in list(self._open)]

    def _serve(self) -> Admissions[C]:
        """Begins to serve the latest of the strangers that wait, if it is time to."""
        is_busy = self._are_more_ready or self._beginning is not None
        if is_busy or not self._waiting or len(self._served) >= self._limit:
            return []
        self._beginning = self._waiting.pop()
        self._served.add(self._beginning)
        return [(Admission.BEGIN, self._beginning)]

    def _brings_voucher(self, connection: C) -> bool:
        """Whether a connection has a place among the members; if so, its voucher is used up."""
        if len(self._members) >= self._limit:
            return False
        number = self._look(connection)
        if number is None or number in self._numbers:
            return False
        if len(self._numbers) >= REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        self._numbers[number] = None
        return True

    def _take_for_member(self, connection: C) -> Admissions[C]:
        del self._open[connection]
        self._silent.discard(connection)
        self._members.add(connection)
        if connection in self._served:
            self._served.remove(connection)
            return []
        self._waiting.remove(connection)
        return [(Admission.BEGIN, connection)]

    def _let_go(self, connection: C) -> tuple[Admission, C]:
        del self._open[connection]
        self._silent.discard(connection)
        if connection in self._served:
            return Admission.TURN_OUT, connection
        self._waiting.remove(connection)
        return Admission.CLOSE, connection
