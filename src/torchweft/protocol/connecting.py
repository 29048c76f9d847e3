"""Decides how two workers connect: which side dials or accepts, and when a peer is lost.

The problem: both sides may dial at once; a greeting may be lost, repeated or overtaken; a peer
may be dead, stopped, or cut off in one direction. Two errors are expensive: the two sides keep
different connections, or a living peer is declared lost.

The idea: each side has one state machine per peer. The shell reports events with the time, under
one lock per peer, and carries out the actions; only the machine decides. A first connection over
TCP is an *offer* that names a session; all attempts of one side use the same name. The acceptor
recognizes a repeated offer by this name, and a stale one by its attempt number. From its first
``HELLO`` on, the offer of the worker with the higher id stands until it is answered.

``greetings`` has what the sides say to each other, ``sessions`` the failure detector of sessions,
``strangers`` bounds unauthenticated connections. ``docs/protocols/connecting.md`` has the states,
events and actions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.protocol.greetings import (
    CROSSED,
    Answer,
    Failure,
    Hello,
    Purpose,
    Terms,
    Unreachable,
    Verdict,
)
from torchweft.protocol.sessions import Contact, ContactStep


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
CROSSING_S = 0.25
"""How long to wait for the peer's own connection before this side dials."""


class FirstDial:
    """The retry policy of one caller that needs the first connection to a peer.

    A peer that cannot be reached is given up after ``timeout_s``. A peer is alive if its system
    accepts connections, or if it answers that it dials itself. Then its time limit restarts, and
    only the caller's own deadline ends the attempts. Time in which this process was stopped or held
    up does not count.

    Args:
        now_s: The time now.
        deadline_s: The time at which the caller gives up waiting; may be infinite.
        timeout_s: Time limit of one attempt, and of all attempts on a silent peer.
    """

    def __init__(self, now_s: float, deadline_s: float, timeout_s: float) -> None:
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._give_up_s = now_s + timeout_s
        self._pause_s = FIRST_PAUSE_S
        self._next_s = self._due_s = now_s
        self._arrival_s: float | None = None
        self._doubtful_s = self._next_s
        self._was_told = self._was_heard = False

    def limit_s(self, now_s: float) -> float:
        """Returns the deadline of an attempt that begins now."""
        self._due_s = min(now_s + self._timeout_s, self._deadline_s)
        return self._due_s

    def heard(self) -> None:
        """Notes that the peer made a connection, for any purpose, and so is alive."""
        self._was_heard = True

    @property
    def is_awaiting(self) -> bool:
        """Whether this side waits for the peer's own connection."""
        return self._arrival_s is not None

    def await_peer(self, now_s: float, *, was_told: bool) -> Step:
        """Returns the step to wait for the connection that the peer is making.

        Args:
            now_s: The time now.
            was_told: Whether the peer said so, which proves that it is alive.
        """
        self._arrival_s = self.limit_s(now_s)
        self._doubtful_s = min(now_s + CROSSING_S, self._arrival_s)
        self._was_told = was_told
        return self._wait(now_s + FIRST_PAUSE_S)

    def go_on(self, now_s: float, *, is_accepting: bool) -> Step | None:
        """Returns the next step after a wait, or None when it is time to dial."""
        self._excuse(now_s)
        if self._arrival_s is None:
            if now_s < self._next_s:
                return self._wait(self._next_s)
            return Busy("there was no time left to dial") if now_s >= self._deadline_s else None
        if now_s < self._arrival_s and (is_accepting or now_s <= self._doubtful_s):
            return self._wait(now_s + FIRST_PAUSE_S)
        self._arrival_s = None
        failure = Failure.CROSSED if self._was_told else Failure.BROKEN
        return self.failed(now_s, failure, "the connection that it announced did not come")

    def failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        """Returns the next step after a failed attempt."""
        self._excuse(now_s)
        if failure in (Failure.REFUSED, Failure.GONE):
            return Lose(cause, failure)
        if failure in (Failure.BUSY, Failure.CROSSED) or self._was_heard:
            self._give_up_s = now_s + self._timeout_s
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
            is_crossing = self._accepts or self._first.is_awaiting
            return State.CROSSING if is_crossing else State.DIALLING
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

    def dial_failed(self, now_s: float, failure: Failure, cause: str) -> Step:
        """Returns the next step after the attempt of ``Dial`` failed."""
        if self._first is None or self._is_decided:
            return Done()
        if failure is Failure.CROSSED:
            return self._first.await_peer(now_s, was_told=True)
        return self._first.failed(now_s, failure, cause)

    def go_on(self, now_s: float) -> Step:
        """Returns the next step after the wait of ``Wait``."""
        if self._first is None or self._is_decided:
            return Done()
        step = self._first.go_on(now_s, is_accepting=bool(self._accepts))
        return self._dial_or_wait(now_s) if step is None else step

    @property
    def _is_decided(self) -> bool:
        return self._is_linked or self.cause is not None

    def _dial_or_wait(self, now_s: float) -> Step:
        assert self._first is not None
        assert self._offer is not None
        if self._accepts:
            return self._first.await_peer(now_s, was_told=False)
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
