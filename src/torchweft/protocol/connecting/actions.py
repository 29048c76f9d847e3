"""States of a connection, and the steps, actions and answers that the machine returns."""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.Enum):
    """The state of one worker's connection to another."""

    IDLE = "idle"
    """There is no connection, and no thread needs one."""
    DIALLING = "dialling"
    """This side makes the first connection, or pauses between two attempts."""
    ACCEPTING = "accepting"
    """The peer makes the first connection, and this side has accepted its offer."""
    CROSSING = "crossing"
    """Both sides dial (simultaneous open); this side waits for the peer's connection."""
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


class Terms(NamedTuple):
    """A session's name, whether this side dialled it, and the connection attempt's number."""

    name: str
    was_dialled: bool
    attempt: int


class Patience(NamedTuple):
    """How long contact with a peer may be lost; see ``docs/protocols/sessions.md``."""

    detection_s: float
    reconnect_s: float


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
