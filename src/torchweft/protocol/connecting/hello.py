"""The dialler's greeting: which worker the connection is for, and its purpose."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from torchweft.errors import ProtocolError
from torchweft.protocol.connecting.actions import Answer, Terms, Verdict

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
