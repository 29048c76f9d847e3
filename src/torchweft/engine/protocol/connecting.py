"""Decides how two workers connect: which side dials or accepts, and when a peer is lost.

The problem: both sides may dial at once; a greeting may be lost, repeated or overtaken; a peer
may be dead, stopped, or cut off in one direction. Two errors are expensive: the two sides keep
different connections, or a living peer is declared lost.

The idea: each side has one state machine per peer. The shell reports events with the time, under
one lock per peer, and carries out the actions; only the machine decides. A first connection over
TCP is an *offer* that names a session; all attempts of one side use the same name. The acceptor
recognizes a repeated offer by this name, and a stale one by its attempt number. From its first
``HELLO`` on, the offer of the worker with the higher id stands until it is answered.

The first part has what the sides say to each other, and what a failed attempt means. A worker may
have several addresses: ``Reaching`` decides which of them to dial, and combines their outcomes into
one ``Failure``. ``sessions`` has the failure detector of sessions, ``strangers`` bounds
unauthenticated connections. ``docs/protocols/connecting.md`` has the states, events and actions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.engine.protocol.registration import HOST, NETWORK
from torchweft.engine.protocol.sessions import Contact, ContactStep
from torchweft.errors import ConfigurationError, ProtocolError

# What the sides say to each other, and what a failed attempt means


class Terms(NamedTuple):
    """A session's name, whether this side dialled it, and the connection attempt's number."""

    name: str
    was_dialled: bool
    attempt: int


class Failure(enum.Enum):
    """Why an attempt to dial failed."""

    REFUSED = enum.auto()
    """No process listens there, or the peer refuses: another attempt is useless."""
    GONE = enum.auto()
    """No process listens any more where a worker of this host did: the worker has ended."""
    BUSY = enum.auto()
    """The peer's system accepts connections but the peer does not speak: it is alive."""
    CROSSED = enum.auto()
    """The peer answers that it is dialling itself (simultaneous open): it is alive. This side dials
    again all the same, until the connection of the peer has come."""
    BROKEN = enum.auto()
    """The network does not reach the peer, or the connection broke."""


class Verdict(enum.Enum):
    """What to do with an incoming connection after its greeting."""

    ACCEPT = enum.auto()
    """Answer ``WELCOME`` and ``adopt`` it as the first; on failure, ``accept_failed``."""
    WELCOME_AGAIN = enum.auto()
    """The dialler missed the first answer: do as for RESUME, from the beginning."""
    RESUME = enum.auto()
    """If ``take_attempt`` allows it, answer, and resume the session over it."""
    BREAK_OFF = enum.auto()
    """Confirm, and end the session's connection: it broke at the peer."""
    TAKE_DATA = enum.auto()
    """Answer without a refusal, and keep the connection for data."""
    CONFIRM = enum.auto()
    """Answer without a refusal, and close it."""
    REFUSE = enum.auto()
    """Answer with a refusal that says why."""
    HANG_UP = enum.auto()
    """Close it without an answer: the peer may retry."""


class Answer(NamedTuple):
    """The answer to a greeting.

    Attributes:
        verdict: What to do.
        text: Why the connection is refused or closed.
        must_dial: Whether to repeat this side's offer now: a pending attempt would wait for its
            answer in vain.
    """

    verdict: Verdict
    text: str = ""
    must_dial: bool = False


# The dialler's greeting: which worker the connection is for, and its purpose


POSITION = "position"


class Purpose(enum.Enum):
    """The purpose of a connection; the values are the names on the wire."""

    LINK = ""
    """The first connection for messages."""
    RESUME = "resume"
    PROBE = "probe"
    DATA = "data"
    INTRODUCTION = "introduction"
    OBSERVE = "observe"
    """A question of an observer, which is no worker."""


class Hello(NamedTuple):
    """What the dialler says about its connection.

    Attributes:
        purpose: What the connection is for.
        to: The id of the intended worker; None if the dialler leaves it open.
        session: The session's name; None without a session.
        attempt: The number of the session's connection attempt.
        position: How many bytes of the session the dialler has received.
        set_number: The set of data connections that the connection belongs to.
        question: What an observer asks.
    """

    purpose: Purpose
    to: int | None = None
    session: str | None = None
    attempt: int = 0
    position: int = 0
    set_number: int = 0
    question: str = ""

    @classmethod
    def about(cls, purpose: Purpose, to: int, terms: Terms | None, position: int = 0) -> Hello:
        """Returns the greeting for a session, or for a connection without one."""
        if terms is None:
            return cls(purpose, to)
        return cls(purpose, to, terms.name, terms.attempt, position)

    @property
    def terms(self) -> Terms | None:
        """The terms of the session that the dialler offers, for the acceptor."""
        return None if self.session is None else Terms(self.session, False, self.attempt)

    def stray_answer(self, me: int, *, is_unix: bool) -> Answer | None:
        """Returns the answer to a greeting that came to the wrong place; None if it did not.

        Args:
            me: The id of this worker.
            is_unix: Whether the connection is over a Unix socket, where there are no sessions.
        """
        if self.to not in (None, me):
            return Answer(Verdict.REFUSE, "the worker that was here is gone")
        if self.purpose is Purpose.LINK and (self.session is None) != is_unix:
            return Answer(Verdict.HANG_UP, "a session goes over TCP, and only there")
        return None

    def facts(self) -> dict[str, Any]:
        """Returns the fields of the greeting that do not have their defaults."""
        told = {**self._asdict(), "purpose": self.purpose.value}
        defaults = {**self._field_defaults, "purpose": Purpose.LINK.value}
        return {name: value for name, value in told.items() if value != defaults[name]}

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Hello:
        """Reads a greeting; raises ProtocolError if a field is wrong."""
        try:
            purpose = Purpose(facts.get("purpose", ""))
        except ValueError:
            raise ProtocolError(f"a connection is for {facts['purpose']!r}") from None
        told = {name: facts[name] for name in _TYPES if facts.get(name) is not None}
        for name, value in told.items():
            if type(value) is not _TYPES[name] or (type(value) is int and value < 0):
                raise ProtocolError(f"a greeting has {value!r} for its {name}")
        return cls(purpose, **told)


_TYPES: dict[str, type] = {
    "to": int,
    "session": str,
    "attempt": int,
    "position": int,
    "set_number": int,
    "question": str,
}
"""The types of the fields of a greeting; a field that is missing has its default."""


def position_in(facts: dict[str, Any]) -> int:
    """Returns the peer's position in a session; raises ProtocolError if it is malformed."""
    position = facts.get(POSITION)
    if type(position) is not int or position < 0:
        raise ProtocolError(f"a session goes on at byte {position!r}, which is no position")
    return position


OBSERVER = -1
"""The id of an observer, which is no worker."""


# The errors of dialling another worker, and their meaning to the state machine


CROSSED = "crossed"
"""The refusal of a redundant connection: the other connection stays."""
TAKEN = "taken"
"""The refusal of a worker with the name or rank of another one."""


class Unreachable(ConnectionError):
    """A peer does not answer at its addresses; the agent declares the peer lost."""


class HandshakeTimeout(TimeoutError):
    """A worker did not answer in time. It may be busy or stopped: it is not lost."""


class Refused(ConnectionRefusedError):
    """Nothing listens there, or the listener refuses this worker: a retry is useless."""


class Taken(Refused):
    """The listener refuses this worker because another worker has its name or rank."""


class Gone(Refused):
    """Nothing listens any more at the addresses of a worker of this host."""


class Crossed(ConnectionError):
    """Simultaneous open: the peer dials itself, so it lives; its connection is yet to arrive."""


_FAILURES: tuple[tuple[tuple[type[Exception], ...], Failure], ...] = (
    ((Gone,), Failure.GONE),
    ((Crossed,), Failure.CROSSED),
    ((Refused, ProtocolError, ConfigurationError), Failure.REFUSED),
    ((TimeoutError,), Failure.BUSY),
)


def failure_of(error: Exception) -> Failure:
    """Returns what an error means to the state machine; any unlisted one means the network."""
    for kinds, failure in _FAILURES:
        if isinstance(error, kinds):
            return failure
    return Failure.BROKEN


def check_welcome(refusal: str) -> None:
    """Raises the error that the answer to a greeting means, unless its refusal is empty.

    Raises:
        Crossed: The peer makes a connection itself.
        Taken: The peer knows another worker of this worker's name or rank.
        Refused: The peer refuses the connection for any other reason.
    """
    if refusal == CROSSED:
        raise Crossed("it makes a connection itself")
    if refusal:
        raise (Taken if refusal == TAKEN else Refused)(f"turned away: {refusal}")


# Which addresses of a worker to dial, and what it means that none answers


_NO_SECRET = (
    "without a secret, a worker connects to others of its own machine only; give all of them the "
    f"same: {knobs.SECRET_FILE.variable}=FILE, or secret=..."
)


class Means(NamedTuple):
    """The connections that one worker can make.

    Attributes:
        has_secret: Whether it can prove that it belongs to the group.
        has_tls: Whether it secures connections over TCP.
        uses_unix: Whether it dials Unix sockets.
    """

    has_secret: bool
    has_tls: bool
    uses_unix: bool


class Reaching:
    """One attempt to reach any address of a worker; collects the outcome for each address.

    Args:
        own: What this worker registered about its host and network.
        others: What the other worker registered.
        means: The connections that this worker can make.
    """

    def __init__(self, own: Mapping[str, Any], others: Mapping[str, Any], means: Means) -> None:
        self._host, self._own_host = others.get(HOST), own.get(HOST)
        network = own.get(NETWORK)
        # In the same network stack, a refusal shows the worker's death.
        self._is_here = bool(network) and others.get(NETWORK) == network
        self._means = means
        self._tried: list[tuple[str, Failure, str]] = []

    def may_dial(self, address: str, is_secure: bool | None, *, is_far: bool) -> bool:
        """Returns whether to dial an address; if not, notes why.

        Args:
            address: The address.
            is_secure: Whether TLS is spoken there; None for a Unix socket.
            is_far: Whether other machines can reach the address.
        """
        means = self._means
        if is_secure is None:
            return means.uses_unix
        if is_secure != means.has_tls:
            here, there = ("with", "without") if means.has_tls else ("without", "with")
            reason = (
                f"it is a worker {there} TLS, this one is {here}; give all the same tls options"
            )
        elif is_far and not means.has_secret:
            reason = _NO_SECRET
        else:
            return True
        self.failed(address, Failure.REFUSED, reason)
        return False

    def failed(self, address: str, failure: Failure, reason: str) -> None:
        """Notes that connecting to one address failed.

        ``GONE`` says that no process listens there, ``REFUSED`` that the address does not suit
        this worker, ``BROKEN`` that the network does not reach it.
        """
        self._tried.append((address, failure, reason))

    def goes_on_after(self, address: str, error: Exception) -> bool:
        """Notes the error of dialling an address; returns whether to dial the next address.

        A listener that is silent, or that does not speak the same protocol, ends the attempt.
        """
        if isinstance(error, ConfigurationError):
            self.failed(address, Failure.REFUSED, str(error))
        elif isinstance(error, TimeoutError | ProtocolError) or not isinstance(error, OSError):
            return False
        else:
            is_refused = isinstance(error, ConnectionRefusedError)
            failure = Failure.GONE if is_refused else Failure.BROKEN
            self.failed(address, failure, error.strerror or str(error))
        return True

    @property
    def failure(self) -> Failure:
        """The combined failure; having no address at all counts as a refusal."""
        found = {failure for _, failure, _ in self._tried}
        if Failure.BROKEN in found:
            return Failure.BROKEN
        is_gone = self._is_here and found == {Failure.GONE}
        return Failure.GONE if is_gone else Failure.REFUSED

    @property
    def cause(self) -> str:
        """The combined failure as a text, with advice for a worker on another host."""
        if self.failure is Failure.GONE:
            return "its process has ended: nothing listens at its address any more"
        # Another host's Unix sockets do not exist here: only its other addresses are informative.
        far = [each for each in self._tried if not each[0].startswith("unix:")]
        reasons = [f"{address}: {reason}" for address, _, reason in far or self._tried]
        return ("; ".join(reasons) or "none of its addresses can be reached from here") + self._hint

    def error(self) -> Exception:
        """Returns the error of a worker that none of its addresses leads to."""
        kind = {Failure.GONE: Gone, Failure.REFUSED: Refused}.get(self.failure, ConnectionError)
        return kind(self.cause)

    @property
    def _hint(self) -> str:
        if not self._host or self._host == self._own_host:
            return ""
        return (
            f"; it is on host {self._host!r}, this worker on {self._own_host!r}: on each, set the "
            f"variable {knobs.LISTEN.variable} to the host's address and "
            f"{knobs.SECRET_FILE.variable} to a file with the group's secret, and see that nothing "
            "is blocked"
        )


# The state of one connection


class State(enum.Enum):
    """The state of one worker's connection to another."""

    IDLE = "idle"
    """There is no connection, and no thread needs one."""
    DIALLING = "dialling"
    """This side makes the first connection, or pauses between two attempts."""
    ACCEPTING = "accepting"
    """The peer makes the first connection, and this side has accepted its offer."""
    CROSSING = "crossing"
    """A thread needs the first connection, and waits for that which the peer makes."""
    LINKED = "linked"
    """There is a connection."""
    BROKEN = "broken"
    """The connection of a session has ended, and the next attempt is not due yet."""
    RESUMING = "resuming"
    """This side dials to resume a session, or to ask the peer to resume it."""
    LOST = "lost"
    """The peer was declared lost, for good."""
    LEFT = "left"
    """The peer has left the group as announced, or the whole group is leaving."""


class Patience(NamedTuple):
    """How long contact with a peer may be lost; see ``docs/protocols/sessions.md``."""

    detection_s: float
    reconnect_s: float


# Steps of a thread that needs the first connection


class Dial(NamedTuple):
    """A step: open a connection; if ``offer`` allows it, send ``HELLO`` with these terms.

    ``adopt`` follows if the peer accepts, ``dial_failed`` if the attempt fails. ``limit_s`` is the
    attempt's deadline.
    """

    terms: Terms
    limit_s: float


class Wait(NamedTuple):
    """A step: wait for a connection, at most until ``until_s``; then call ``go_on``."""

    until_s: float


class Done(NamedTuple):
    """A step: nothing is left to do. There is a connection, or the peer is lost."""


class Busy(NamedTuple):
    """A step: report a timeout to the caller. The peer may be alive; ``cause`` says more."""

    cause: str


class Lose(NamedTuple):
    """A step or action: the peer is lost. ``failure`` is set for first connections only."""

    cause: str
    failure: Failure | None = None


Step = Dial | Wait | Done | Busy | Lose
"""Every step of a thread that needs the first connection."""


# Actions for a session


class Redial(NamedTuple):
    """An action: have a thread call ``redial`` and carry out its answer. One at a time."""


class Resume(NamedTuple):
    """Make a new connection for a session that this side dialled; ``next_attempt`` numbers it."""

    limit_s: float


class Probe(NamedTuple):
    """Ask the side that dialled the session to resume it, if it knows of no later attempt."""

    terms: Terms
    limit_s: float


Action = Redial | Lose
"""Every action for a session."""


def no_connection(name: str, addresses: Sequence[str], step: Step) -> Unreachable:
    """Returns the error for a thread that carries out no more steps.

    Args:
        name: The peer's name.
        addresses: Where the peer listens.
        step: The last step; any but ``Lose`` shows that this worker no longer wants the peer.
    """
    if not isinstance(step, Lose):
        return Unreachable("it is not wanted any more")
    if step.failure is Failure.GONE:
        return Unreachable(step.cause)
    where = ", ".join(addresses) or "no address"
    return Unreachable(f"no connection to worker {name!r} at {where}: {step.cause}")


FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
LATE_S = 1.0
"""A thread that is later than this was stopped or held up."""


class FirstDial:
    """The retry policy of one caller that needs the first connection to a peer.

    A peer that cannot be reached is given up after ``timeout_s``. A peer is alive if its system
    accepts connections, or if it answers that it dials itself. Then its time limit restarts, and
    only the caller's own deadline ends the attempts. Time in which this process was stopped or held
    up does not count.

    A connection that the peer's system accepted may stand for long before it breaks: the peer may
    be busy. That time does not count either, up to another ``timeout_s``. A proxy may accept
    connections for a dead worker, so a connection that breaks is no sign of life by itself.

    Args:
        now_s: The time now.
        deadline_s: The time at which the caller gives up waiting; may be infinite.
        timeout_s: Time limit of one attempt, and of all attempts on a silent peer.
    """

    def __init__(self, now_s: float, deadline_s: float, timeout_s: float) -> None:
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._give_up_s = now_s + timeout_s
        self._allowance_s = timeout_s
        self._reached_s = math.inf
        self._pause_s = FIRST_PAUSE_S
        self._next_s = self._due_s = now_s
        self._was_heard = False

    def limit_s(self, now_s: float) -> float:
        """Returns the deadline of an attempt that begins now."""
        self._reached_s = math.inf
        self._due_s = min(now_s + self._timeout_s, self._deadline_s)
        return self._due_s

    def reached(self, now_s: float) -> None:
        """Notes that the peer's system accepted the connection of the attempt."""
        self._reached_s = now_s

    def heard(self) -> None:
        """Notes that the peer made a connection, for any purpose, and so is alive."""
        self._was_heard = True

    def go_on(self, now_s: float, *, is_accepting: bool) -> Step | None:
        """Returns the next step after a wait, or None when it is time to dial.

        Args:
            now_s: The time now.
            is_accepting: Whether the peer is making the connection, for which to wait.
        """
        self._excuse(now_s)
        if is_accepting and now_s < self._deadline_s:
            return self._wait(now_s + FIRST_PAUSE_S)
        if now_s < self._next_s:
            return self._wait(self._next_s)
        return Busy("there was no time left to dial") if now_s >= self._deadline_s else None

    def failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        """Returns the next step after a failed attempt."""
        self._excuse(now_s)
        if failure in (Failure.REFUSED, Failure.GONE):
            return Lose(cause, failure)
        self._discount(now_s)
        if failure in (Failure.BUSY, Failure.CROSSED) or self._was_heard:
            self._give_up_s = now_s + self._timeout_s
            self._allowance_s = self._timeout_s
            self._was_heard = False
        elif now_s + self._pause_s > self._give_up_s:
            return Lose(cause, failure)
        self._next_s = now_s + self._pause_s
        if self._next_s >= self._deadline_s:
            return Busy(cause)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return self._wait(self._next_s)

    def _wait(self, until_s: float) -> Wait:
        self._due_s = until_s
        return Wait(until_s)

    def _discount(self, now_s: float) -> None:
        """Adds the time for which the attempt's connection stood to the peer's time limit."""
        stood_s = min(max(now_s - self._reached_s, 0.0), self._allowance_s)
        self._allowance_s -= stood_s
        self._give_up_s += stood_s

    def _excuse(self, now_s: float) -> None:
        """Restarts the peer's time limit if this side is late."""
        if now_s - self._due_s > LATE_S:
            self._give_up_s = now_s + self._timeout_s
        self._due_s = max(self._due_s, now_s)


LEFT_CAUSE = "left the group"
FAREWELL_BYTES = 256
REDIAL_LIMIT_S = 2.0
"""Time limit of one attempt: the kernel's own retry intervals on a silent network grow too fast."""
LEAST_REDIAL_LIMIT_S = 0.1
_FINAL = frozenset({Failure.REFUSED, Failure.GONE})


class Connecting:
    """One worker's connection to another: its state, and the work that it needs.

    Methods take events and the time, and return what the shell has to do. The time must be
    monotonic. Not thread-safe: the shell reports events under a lock.

    Args:
        peer: The id of the other worker.
        name: The other worker's name, for answers.
    """

    def __init__(self, peer: int, name: str) -> None:
        self.peer = peer
        self._name = name
        self._first: FirstDial | None = None
        self._offer: Terms | None = None
        self._is_offered = False
        self._accepts = 0
        self._is_linked = False
        self._contact: Contact | None = None
        self._patience = Patience(math.inf, math.inf)
        self._is_ending = self._has_ended = False
        self.session: Terms | None = None
        """The current session, with its latest attempt; None over a Unix socket."""
        self.is_departing = False
        """Whether the peer has said that it leaves an open group."""
        self.farewell = ""
        """The reason that the peer gave for leaving, or empty."""
        self.cause: str | None = None
        """Why the peer is lost; None while it is not."""

    @property
    def state(self) -> State:
        """The state; see ``docs/protocols/connecting.md``."""
        if self.cause is not None:
            return State.LEFT if self.is_departing else State.LOST
        if self._has_ended:
            return State.LEFT
        if self._is_linked:
            if self._contact is not None and self._contact.is_dialling:
                return State.RESUMING
            return State.BROKEN if self.is_broken else State.LINKED
        if self._first is not None:
            return State.CROSSING if self._accepts else State.DIALLING
        return State.ACCEPTING if self._accepts else State.IDLE

    @property
    def has_session(self) -> bool:
        """Whether there is a session that has not ended."""
        return self._contact is not None

    @property
    def is_broken(self) -> bool:
        """Whether there is a session without a connection."""
        return self._contact is not None and self._contact.is_broken

    # The first connection: a thread needs one

    def want(self, now_s: float, deadline_s: float, timeout_s: float, name: str) -> Step:
        """Returns the first step for a thread that needs a connection; one thread at a time.

        Args:
            now_s: The time now.
            deadline_s: The time at which the thread gives up; may be infinite.
            timeout_s: Time limit of one attempt, and of all attempts on a silent peer.
            name: A new session name. It is ignored if this side already has one, which the peer
                may have heard.
        """
        if self._is_decided:
            return Done()
        if self._offer is None:
            self._offer = Terms(name, True, 0)
        self._first = FirstDial(now_s, deadline_s, timeout_s)
        return self._dial_or_wait(now_s)

    def want_no_more(self) -> None:
        """Notes that the thread carries out no more steps."""
        self._first = None

    def offer(self) -> bool:
        """Returns whether to send ``HELLO`` over the open connection; if not, close it.

        From then on the offer stands: the peer may have received it even if no answer comes.
        """
        if self._is_decided or self._accepts:
            return False
        self._is_offered = True
        return True

    def reached(self, now_s: float) -> None:
        """Notes that the peer's system accepted a connection of this side, which may still break.

        For a session, that is a sign of life.
        """
        if self._first is not None:
            self._first.reached(now_s)
        if self._contact is not None:
            self._contact.reached(now_s)

    def dial_failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        """Returns the next step after the attempt of ``Dial`` failed."""
        if self._first is None or self._is_decided:
            return Done()
        return self._first.failed(now_s, failure, cause)

    def go_on(self, now_s: float) -> Step:
        """Returns the next step after the wait of ``Wait``."""
        if self._first is None or self._is_decided:
            return Done()
        return self._dial_or_wait(now_s)

    @property
    def _is_decided(self) -> bool:
        return self._is_linked or self.cause is not None

    def _dial_or_wait(self, now_s: float) -> Step:
        assert self._first is not None
        assert self._offer is not None
        step = self._first.go_on(now_s, is_accepting=bool(self._accepts))
        if step is not None:
            return step
        self._offer = self._offer._replace(attempt=self._offer.attempt + 1)
        return Dial(self._offer, self._first.limit_s(now_s))

    # The first connection: it is made

    def adopt(self, now_s: float, terms: Terms | None, patience: Patience) -> str:
        """Makes a connection the link to the peer; returns why it cannot, or an empty string.

        Args:
            now_s: The time now.
            terms: Its session's terms; None without a session: the connection ends with the peer.
            patience: How long contact may be lost.
        """
        if self.cause is not None:
            return "the peer is lost"
        if self._is_linked:
            return "an earlier greeting of the peer was slower to be taken"
        self._is_linked, self._accepts = True, 0
        self.session = terms
        if terms is not None:
            self._patience = patience
            self._contact = Contact(now_s, *patience)
        return ""

    def accept_failed(self) -> None:
        """Notes that an accepted connection failed before ``adopt``."""
        self._accepts = max(0, self._accepts - 1)

    # The peer has dialled

    def hello(self, me: int, said: Hello) -> Answer:
        """Returns the answer to an authenticated greeting of the peer.

        Args:
            me: The id of this worker.
            said: The peer's greeting.
        """
        if self._first is not None:
            self._first.heard()
        if said.purpose is Purpose.INTRODUCTION:
            return Answer(Verdict.CONFIRM)
        if self.cause is not None:
            return Answer(Verdict.REFUSE, f"this group lost worker {self._name!r} before")
        if said.purpose is Purpose.DATA:
            return Answer(Verdict.TAKE_DATA)
        if said.purpose is Purpose.LINK:
            return self._answer_offer(me, said)
        if not self._is_linked:
            return self._answer_early(said)
        if self.session is None or self.session.name != said.session:
            return Answer(Verdict.REFUSE, "there is no such session")
        if said.purpose is Purpose.PROBE:
            # A probe for an earlier attempt is stale: this side has replaced it already.
            is_news = self.session.was_dialled and self.session.attempt == said.attempt
            return Answer(Verdict.BREAK_OFF if is_news else Verdict.CONFIRM)
        if self.session.was_dialled:
            return Answer(Verdict.HANG_UP, "a session is resumed by the side that dialled it")
        return Answer(Verdict.RESUME)

    def _answer_offer(self, me: int, said: Hello) -> Answer:
        """Answers the peer's offer of a first connection.

        The offer of the worker with the higher id stands once the peer may have received it. The
        peer may have accepted it already, and the two sides would keep different connections.
        """
        if self._is_linked:
            session = self.session
            if session is None or session.was_dialled or session.name != said.session:
                return Answer(Verdict.REFUSE, CROSSED)
            return Answer(Verdict.WELCOME_AGAIN)
        if self._is_offered and me > self.peer:
            return Answer(Verdict.REFUSE, CROSSED, must_dial=self._first is None)
        self._accepts += 1
        return Answer(Verdict.ACCEPT)

    def _answer_early(self, said: Hello) -> Answer:
        """Answers a resume or probe of a session that this side does not have yet.

        The peer may be ahead: if it names this side's offer, it accepted that and its answer was
        lost. A pending attempt may then wait in vain, and a repeated one does no harm.
        """
        offered = self._offer.name if self._is_offered and self._offer is not None else None
        is_own = offered is not None and offered == said.session
        if self._accepts or self._first is not None or is_own:
            return Answer(Verdict.HANG_UP, "this side is not done yet", must_dial=is_own)
        return Answer(Verdict.REFUSE, "there is no such session")

    def take_attempt(self, attempt: int) -> bool:
        """Returns whether an incoming connection may replace that of the session.

        Called when the connection's turn comes, one connection at a time.
        """
        if self.cause is not None or self.session is None or attempt <= self.session.attempt:
            return False
        self.session = self.session._replace(attempt=attempt)
        return True

    # Sessions break and resume

    def broke(self, now_s: float, cause: str, *, is_answer: bool) -> list[Action]:
        """Takes the end of the connection; for ``is_answer`` see ``Contact.broke``."""
        if self._contact is None or self._is_ending:
            return [Lose(cause)]
        self._contact.broke(now_s, cause, is_answer=is_answer)
        return self.step(now_s)

    def heard(self, at_s: float) -> None:
        """Notes that the peer or its operating system answered at ``at_s``."""
        if self._contact is not None:
            self._contact.heard(at_s)

    def silence_s(self, now_s: float) -> float:
        """Returns how long the peer has been silent, in seconds; 0 without a session."""
        return 0.0 if self._contact is None else max(0.0, self._contact.silence_s(now_s))

    def step(self, now_s: float) -> list[Action]:
        """Returns what is due now; to be called at ``due_s`` at the latest."""
        step = ContactStep.NOTHING if self._contact is None else self._contact.step(now_s)
        if step is ContactStep.DIAL:
            return [Redial()]
        if step is ContactStep.GIVE_UP:
            assert self._contact is not None
            return [Lose(self._contact.cause)]
        return []

    def due_s(self) -> float:
        """Returns the latest time at which to call ``step``; infinite without a session."""
        return math.inf if self._contact is None else self._contact.due_s()

    def redial(self, now_s: float, timeout_s: float) -> Resume | Probe | None:
        """Returns what a thread that is ready to dial has to do; None if no longer needed.

        Only the side that dialled a session resumes it: if both did, they would replace
        connections for ever.

        Args:
            now_s: The time now.
            timeout_s: Upper limit for one connection attempt.
        """
        contact, session = self._contact, self.session
        if contact is None or session is None or not contact.is_dialling:
            return None
        # An attempt must find that a silent peer still listens before the peer is given up.
        patience_s = self._patience[int(contact.is_broken)]
        limit_s = max(patience_s / 4, LEAST_REDIAL_LIMIT_S)
        limit_s = now_s + min(timeout_s, REDIAL_LIMIT_S, limit_s)
        return Resume(limit_s) if session.was_dialled else Probe(session, limit_s)

    def next_attempt(self) -> Terms | None:
        """Numbers a new connection for a session of this side; returns None if it has ended.

        The old connection is abandoned: data that still arrives over it is sent again.
        """
        if self._contact is None or self.session is None:
            return None
        self.session = self.session._replace(attempt=self.session.attempt + 1)
        return self.session

    def resumed(self, now_s: float) -> None:
        """Notes that the session goes on over a new connection, whichever side made it."""
        if self._contact is not None:
            self._contact.resumed(now_s)

    def probed(self, now_s: float) -> None:
        """Notes that a probe reached the peer, which will resume the session itself."""
        if self._contact is not None:
            self._contact.dialled(now_s)

    def redial_failed(self, now_s: float, failure: Failure, cause: str) -> list[Action]:
        """Takes the failure of a ``Resume`` or ``Probe``; returns what is due."""
        if self._contact is None:
            return []
        is_final, is_there = failure in _FINAL, failure is Failure.BUSY
        self._contact.dial_failed(now_s, cause, is_final=is_final, is_there=is_there)
        return self.step(now_s)

    # The end

    def goodbye(self, reason: bytes) -> None:
        """Notes that the peer ends the connection on purpose, and its reason if it gives one."""
        self._is_ending = True
        text = reason[:FAREWELL_BYTES].decode(errors="replace")
        self.farewell = "".join(each if each.isprintable() else " " for each in text)

    def depart(self) -> None:
        """Notes that the peer leaves an open group: the end of its connection is expected."""
        self.is_departing = True

    @property
    def knows_cause(self) -> bool:
        """Whether ``lose`` has a better cause than its argument."""
        return self.cause is not None or self.is_departing or bool(self.farewell)

    def end(self) -> None:
        """Notes that the group or this worker is leaving: a connection's end is no loss."""
        self._has_ended = self._is_linked
        self._contact = None

    def lose(self, cause: str) -> str | None:
        """Declares the peer lost; returns the cause to show to users, or None if it was before.

        Args:
            cause: What was noticed. A reason that the peer gave takes precedence.
        """
        if self.cause is not None:
            return None
        self.cause = LEFT_CAUSE if self.is_departing else self.farewell or cause
        self._contact = self._first = None
        return self.cause
