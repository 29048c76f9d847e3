"""States of a connection, and what the machine asks of the shell around it."""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.Enum):
    """How far one worker is in connecting to another."""

    IDLE = "idle"
    """There is no connection, and nobody needs one yet."""
    DIALLING = "dialling"
    """This side makes the first connection, or pauses between two attempts."""
    ACCEPTING = "accepting"
    """The other side makes the first connection, and was told that it is welcome."""
    CROSSING = "crossing"
    """Both sides make one; this side waits for that of the other."""
    LINKED = "linked"
    """There is a connection."""
    BROKEN = "broken"
    """The connection of a session has ended, and the next attempt is not due yet."""
    RESUMING = "resuming"
    """This side dials for a session: it resumes it, or asks the other side to."""
    LOST = "lost"
    """The peer is given up, for good."""
    LEFT = "left"
    """The peer has left the group as it said, or the whole group is leaving."""


class Terms(NamedTuple):
    """Of a session: its name, whether this side dialled it, and at which attempt."""

    name: str
    was_dialled: bool
    attempt: int


class Patience(NamedTuple):
    """How long contact with another worker may be lost: see ``docs/protocols/sessions.md``."""

    detection_s: float
    reconnect_s: float


class Failure(enum.Enum):
    """Why an attempt to dial came to nothing."""

    REFUSED = enum.auto()
    """Nobody listens there, or the answer is no: another attempt is no use."""
    GONE = enum.auto()
    """Nobody listens any more where a worker of this host did: its process has ended."""
    BUSY = enum.auto()
    """The peer's system accepts connections, and the peer does not speak: it lives."""
    CROSSED = enum.auto()
    """The peer answers that it makes a connection itself: it lives."""
    BROKEN = enum.auto()
    """The network does not carry that far, or the connection broke."""


# Steps of a thread that needs the first connection


class Dial(NamedTuple):
    """A step: open a connection; if ``offer`` allows it, say ``HELLO`` with these terms.

    ``adopt`` follows where it is welcome, ``dial_failed`` otherwise. ``limit_s`` is the time at
    which the attempt has failed.
    """

    terms: Terms
    limit_s: float


class Wait(NamedTuple):
    """A step: wait until there is a connection, at most until ``until_s``; then ``go_on``."""

    until_s: float


class Done(NamedTuple):
    """A step: no more to do. There is a connection, or the peer is lost."""


class Busy(NamedTuple):
    """A step: tell the caller that its time is up. The peer may be alive; ``cause`` says more."""

    cause: str


class Lose(NamedTuple):
    """A step, or an action: the peer is lost. ``failure`` is that of a first connection."""

    cause: str
    failure: Failure | None = None


Step = Dial | Wait | Done | Busy | Lose
"""Every step of a thread that needs the first connection."""


# Actions for a session


class Redial(NamedTuple):
    """An action: have a thread ask for ``redial``, and carry that out. One at a time."""


class Resume(NamedTuple):
    """Make a new connection for a session of this side; ``next_attempt`` numbers it."""

    limit_s: float


class Probe(NamedTuple):
    """Ask the side that dialled the session to resume it, if it knows of no later attempt."""

    terms: Terms
    limit_s: float


Action = Redial | Lose
"""Every action for a session."""


class Verdict(enum.Enum):
    """What to do with a connection of the other side, after its greeting."""

    ACCEPT = enum.auto()
    """Answer that it is welcome, and ``adopt`` it as the first; else ``accept_failed``."""
    WELCOME_AGAIN = enum.auto()
    """The dialler has not heard the first answer: as RESUME, from the beginning."""
    RESUME = enum.auto()
    """If ``take_attempt`` allows it, answer, and have the session go on over it."""
    BREAK_OFF = enum.auto()
    """Confirm, and end the connection that the session has: the other side lost it."""
    CONFIRM = enum.auto()
    """Answer without a refusal; for data, keep the connection."""
    REFUSE = enum.auto()
    """Answer that it is not welcome, and why."""
    HANG_UP = enum.auto()
    """Close it without an answer: the other side may try again."""


class Answer(NamedTuple):
    """What to answer to a greeting.

    Attributes:
        verdict: What to do.
        text: Why it is refused, or hung up on.
        must_dial: Whether the offer of this side is to be repeated now: its attempt, if there is
            one, waits for an answer in vain.
    """

    verdict: Verdict
    text: str = ""
    must_dial: bool = False
