"""How a dialler greets, how a listener answers, and what a failed attempt means.

A worker may have several addresses. ``Reaching`` decides which of them to dial, and combines their
outcomes into one ``Failure``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.errors import ConfigurationError, ProtocolError


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
    """The peer answers that it is dialling itself (simultaneous open): it is alive."""
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


PURPOSE, TO = "purpose", "to"
SESSION, POSITION, ATTEMPT, SET = "session", "position", "attempt", "set"
QUESTION = "question"


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
        """Returns the fields of the greeting."""
        facts: dict[str, Any] = {TO: self.to}
        if self.purpose is not Purpose.LINK:
            facts[PURPOSE] = self.purpose.value
        if self.session is not None:
            facts |= {SESSION: self.session, ATTEMPT: self.attempt}
        if self.purpose is Purpose.RESUME:
            facts[POSITION] = self.position
        elif self.purpose is Purpose.DATA:
            facts[SET] = self.set_number
        elif self.purpose is Purpose.OBSERVE:
            facts[QUESTION] = self.question
        return facts

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Hello:
        """Reads a greeting; raises ProtocolError if a field is missing or wrong."""
        try:
            purpose = Purpose(facts.get(PURPOSE, ""))
        except ValueError:
            raise ProtocolError(f"a connection is for {facts[PURPOSE]!r}") from None
        to, session = facts.get(TO), facts.get(SESSION)
        if session is not None and not isinstance(session, str):
            raise ProtocolError(f"a session is called {session!r}")
        has_attempt = purpose is Purpose.RESUME or session is not None
        return cls(
            purpose,
            None if to is None else _number(facts, TO),
            session,
            _number(facts, ATTEMPT) if has_attempt else 0,
            position_in(facts) if purpose is Purpose.RESUME else 0,
            _number(facts, SET) if purpose is Purpose.DATA else 0,
            str(facts.get(QUESTION)) if purpose is Purpose.OBSERVE else "",
        )


def position_in(facts: dict[str, Any]) -> int:
    """Returns the peer's position in a session; raises ProtocolError if it is malformed."""
    position = facts.get(POSITION)
    if type(position) is not int or position < 0:
        raise ProtocolError(f"a session goes on at byte {position!r}, which is no position")
    return position


def _number(facts: dict[str, Any], name: str) -> int:
    number = facts.get(name)
    if type(number) is not int:
        raise ProtocolError(f"the {name} of a connection has number {number!r}")
    return number


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


def error_of(failure: Failure, cause: str) -> Exception:
    """Returns the error for a worker that none of its addresses leads to."""
    kind = {Failure.GONE: Gone, Failure.REFUSED: Refused}.get(failure, ConnectionError)
    return kind(cause)


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

HOST, NETWORK = "host", "network"
"""Facts of a worker: the host's name, for messages; an identifier of the network stack, empty if
unknown."""


class Outcome(enum.Enum):
    """Why connecting to one address failed."""

    REFUSED = enum.auto()
    """The remote system says that no process listens there."""
    UNSUITABLE = enum.auto()
    """This worker's configuration, or the address itself, does not allow dialling it."""
    UNANSWERED = enum.auto()
    """The network does not reach the address now."""


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
        self._tried: list[tuple[str, Outcome, str]] = []

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
        self.failed(address, Outcome.UNSUITABLE, reason)
        return False

    def failed(self, address: str, outcome: Outcome, reason: str) -> None:
        """Notes that connecting to one address failed."""
        self._tried.append((address, outcome, reason))

    def goes_on_after(self, address: str, error: Exception) -> bool:
        """Notes the error of dialling an address; returns whether to dial the next address.

        A listener that is silent, or that does not speak the same protocol, ends the attempt.
        """
        if isinstance(error, ConfigurationError):
            self.failed(address, Outcome.UNSUITABLE, str(error))
        elif isinstance(error, TimeoutError | ProtocolError) or not isinstance(error, OSError):
            return False
        else:
            is_refused = isinstance(error, ConnectionRefusedError)
            outcome = Outcome.REFUSED if is_refused else Outcome.UNANSWERED
            self.failed(address, outcome, error.strerror or str(error))
        return True

    @property
    def failure(self) -> Failure:
        """The combined failure; having no address at all counts as a refusal."""
        outcomes = {outcome for _, outcome, _ in self._tried}
        if Outcome.UNANSWERED in outcomes:
            return Failure.BROKEN
        if self._is_here and outcomes == {Outcome.REFUSED}:
            return Failure.GONE
        return Failure.REFUSED

    @property
    def cause(self) -> str:
        """The combined failure as a text, with advice for a worker on another host."""
        if self.failure is Failure.GONE:
            return "its process has ended: nothing listens at its address any more"
        # Another host's Unix sockets do not exist here: only its other addresses are informative.
        far = [each for each in self._tried if not each[0].startswith("unix:")]
        reasons = [f"{address}: {reason}" for address, _, reason in far or self._tried]
        return ("; ".join(reasons) or "none of its addresses can be reached from here") + self._hint

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
