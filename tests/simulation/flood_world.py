"""A worker that strangers flood while members dial it, on hosts that may be busy.

The worker decides by ``Strangers``, the members when to dial again by ``FirstDial``. Simulated are
the queue of the worker's system, the threads, and the processors: a process waits for its turn.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from tests.simulation.timeline import Timeline
from torchweft.engine.protocol.connecting import Failure, FirstDial, Wait
from torchweft.engine.protocol.strangers import Admission, Admissions, Strangers

CONNECT_S = 10.0
ACCEPT_S, SERVE_S = 20e-6, 400e-6
"""The time that the worker needs to accept a connection, and to begin to serve one."""
NEVER_S = 1e9


class Connection:
    """A connection to the worker.

    Args:
        handshake_s: How long its handshake takes once its first bytes are there.

    Attributes:
        voucher: The number of the voucher that has arrived; None before, and for most strangers.
        has_bytes: Whether its first bytes have arrived.
        is_served: Whether a thread waits for its bytes, or has them.
        is_heard: Whether the thread has its first bytes.
        has_ended: Whether its dialler, or the worker, has ended it.
        on_end: Called when the worker has ended it.
    """

    def __init__(self, handshake_s: float = NEVER_S) -> None:
        self.handshake_s = handshake_s
        self.voucher: bytes | None = None
        self.has_bytes = self.is_served = self.is_heard = self.has_ended = False
        self.on_end: Callable[[], None] = lambda: None


class Member:
    """A worker that dials the flooded one.

    Attributes:
        tries: How many connections it has made.
        got_in_s: When it got in; None before.
        has_given_up: Whether it dials no more.
    """

    def __init__(self) -> None:
        self.tries = 0
        self.got_in_s: float | None = None
        self.has_given_up = False


class Flood:
    """The world of one seed, in which strangers dial from the beginning.

    Args:
        seed: Decides everything.
        rate: Connections of strangers in a second.
        turn_s: The longest time that a process waits for its turn.
    """

    machine_type: type[Strangers[Connection]] = Strangers
    """The class of the machine; mutation tests replace it with a faulty one."""

    def __init__(self, seed: int, rate: float, turn_s: float) -> None:
        self.chance = random.Random(seed)
        self.timeline = Timeline()
        self.limit = self.chance.choice((4, 16, 64))
        self.machine = self.machine_type(self.limit, lambda connection: connection.voucher)
        self.threads: set[Connection] = set()
        self.held: set[Connection] = set()
        """Connections whose descriptors the worker has."""
        self.heard_vouchers: list[bytes] = []
        """The vouchers that strangers can read on the network."""
        self.served = self.came = 0
        self._rate, self._turn_s = rate, turn_s
        self._ready: deque[Connection] = deque()
        self._is_accepting = False
        self._beginning: set[Connection] = set()
        self._members = 0
        self._pour()

    def _wait_for_turn(self, what: Callable[..., None], *arguments: object) -> None:
        self.timeline.later(self._turn_s * self.chance.random(), what, *arguments)

    # Strangers

    def _pour(self) -> None:
        stranger, kind = Connection(), self.chance.random()
        if kind < 0.3 and self.heard_vouchers:
            stranger.voucher = self.chance.choice(self.heard_vouchers)
        stranger.has_bytes = kind < 0.5
        if kind > 0.8:
            self.timeline.later(self.chance.random(), self._hang_up, stranger)
        self._arrive(stranger)
        self.timeline.later(self.chance.expovariate(self._rate), self._pour)

    # Members

    def dial(self, handshake_s: float, late_s: Callable[[], float] = lambda: 0.0) -> Member:
        """Has a member dial until it is in, or gives up.

        Args:
            handshake_s: How long a handshake with it takes.
            late_s: Returns how long a voucher comes after its connection; 0 if they come together,
                infinite if there is none, as from an observer.
        """
        member, now_s = Member(), self.timeline.now_s
        tries = FirstDial(now_s, NEVER_S, CONNECT_S)
        self._dial(member, tries, lambda: self._connect(handshake_s, late_s()))
        return member

    def _connect(self, handshake_s: float, late_s: float) -> Connection:
        connection, self._members = Connection(handshake_s), self._members + 1
        number = str(self._members).encode()

        def say() -> None:
            if not connection.has_ended:  # Otherwise the worker never sees the voucher.
                connection.voucher, connection.has_bytes = number, True
                self.heard_vouchers.append(number)
                self._read(connection)

        if late_s == math.inf:
            connection.has_bytes = True
        elif late_s:
            self.timeline.later(late_s, say)
        else:
            say()
        self._arrive(connection)
        return connection

    def _dial(self, member: Member, tries: FirstDial, connect: Callable[[], Connection]) -> None:
        def end() -> None:
            now_s = self.timeline.now_s
            if connection.is_heard and not connection.has_ended:
                member.got_in_s = now_s
                return
            step = tries.failed(now_s, Failure.BROKEN, "it hangs up")
            if isinstance(step, Wait):
                self.timeline.later(step.until_s - now_s, self._dial, member, tries, connect)
            else:
                member.has_given_up = True

        member.tries += 1
        tries.limit_s(self.timeline.now_s)
        connection = connect()
        connection.on_end = lambda: self._wait_for_turn(end)

    # The worker

    def _arrive(self, connection: Connection) -> None:
        self._ready.append(connection)
        if not self._is_accepting:
            self._is_accepting = True
            self._wait_for_turn(self._accept)

    def _accept(self) -> None:
        """Accepts all connections that are ready; is busy as long as that takes."""
        served, count = self.served, len(self._ready)
        while self._ready:
            connection = self._ready.popleft()
            self.came += 1
            self.held.add(connection)
            self._act(self.machine.came(connection))
            self._check()
        self._act(self.machine.all_came())
        self._check()
        busy_s = count * ACCEPT_S + (self.served - served) * SERVE_S
        self.timeline.later(busy_s, self._rest)

    def _rest(self) -> None:
        self._is_accepting = bool(self._ready)
        if self._is_accepting:
            self._wait_for_turn(self._accept)

    def _act(self, admissions: Admissions[Connection]) -> None:
        for what, connection in admissions:
            if what is Admission.BEGIN:
                assert connection not in self.threads, "two threads serve one connection"
                self.threads.add(connection)
                self.served += 1
                self._beginning.add(connection)
                self._wait_for_turn(self._serve, connection)
            elif what is Admission.CLOSE:
                assert connection not in self.threads, "closed while a thread has it"
                connection.has_ended = True
                self.held.remove(connection)
                connection.on_end()
            else:
                self._hang_up(connection)

    def _check(self) -> None:
        members = len(self.machine._members)
        assert len(self.threads) <= self.limit + members, f"{len(self.threads)} threads"
        strangers = self._beginning - self.machine._members
        assert len(strangers) <= 1, f"threads begin for {len(strangers)} strangers at once"
        assert members <= self.limit, f"{members} places of members"
        assert len(self.held) <= 2 * self.limit + members, f"{len(self.held)} descriptors"

    def _serve(self, connection: Connection) -> None:
        connection.is_served = True
        self._beginning.discard(connection)
        self._act(self.machine.began(connection))
        self.timeline.later(CONNECT_S, self._end, connection)
        self._read(connection)

    def _read(self, connection: Connection) -> None:
        """Has the connection's thread read what is there, if it has one."""
        if connection.is_served and (connection.has_bytes or connection.has_ended):
            self._wait_for_turn(self._hear, connection)

    def _hear(self, connection: Connection) -> None:
        if connection.is_heard or connection not in self.threads:
            return
        connection.is_heard = True
        self._act(self.machine.heard(connection))
        delay_s = 0.0 if connection.has_ended else min(connection.handshake_s, CONNECT_S)
        self.timeline.later(delay_s, self._end, connection)

    def _hang_up(self, connection: Connection) -> None:
        """Ends a connection, on either side; its thread notices later."""
        if not connection.has_ended:
            connection.has_ended = True
            if connection.is_served:
                self._wait_for_turn(self._end, connection)

    def _end(self, connection: Connection) -> None:
        if connection in self.threads:
            self.threads.remove(connection)
            self.held.remove(connection)
            self._act(self.machine.ended(connection))
            connection.on_end()
