"""The failure detector of one side of a session: when to dial, and when to give up.

The shell reports events; the machine says what to do. Both sides of a session behave alike, except
that only the side that dialled it first resumes it. The other side asks for that with a probe; see
``docs/protocols/sessions.md``.
"""

from __future__ import annotations

import enum
import math
from collections import deque

from torchweft.engine.wire.frames import Buffer, Frame

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
ACKNOWLEDGE_S = 1.0
"""How often data is acknowledged that is too little to be acknowledged at once."""


class ContactStep(enum.Enum):
    """What to do now."""

    NOTHING = enum.auto()
    DIAL = enum.auto()
    """Try to reach the peer over a new connection; report ``dial_failed`` on failure."""
    GIVE_UP = enum.auto()
    """The peer is lost; ``cause`` says why. This is the last step."""


class Contact:
    """One side's view of its contact with the peer.

    The peer is given up after a silence of ``detection_s``. It is also given up when it, or its
    system, ended the connection and no new one could be made for ``reconnect_s``. After half of the
    detection time in silence, a new connection is tried beside the old one, which may be the reason
    for the silence.

    Time in which this process was stopped or held up does not count. When ``step`` comes more than
    a second later than ``due_s``, all limits move by the delay. Otherwise a process that was
    stopped with a dead connection would give up as soon as it continues. This side's system may
    have heard the peer meanwhile, which moves ``due_s`` and hides the delay. So a delay since the
    due time of the previous step restores the time that was left then.

    Args:
        now_s: The time now; contact has just been made.
        detection_s: See above.
        reconnect_s: See above.
    """

    def __init__(self, now_s: float, detection_s: float, reconnect_s: float) -> None:
        self._detection_s = detection_s
        self._reconnect_s = reconnect_s
        self._heard_s = now_s
        self.is_broken = False
        """Whether the session has no connection now."""
        self._limit_s = now_s + detection_s
        self._asked_s = now_s
        self._awaited_s, self._left_s = math.inf, detection_s
        self._break_cause = ""
        self._dial_at_s = math.inf
        self._pause_s = FIRST_PAUSE_S
        self._has_dialled = False
        self.is_dialling = False
        """Whether the shell was told to dial and still has to report the result."""
        self._fatal = ""
        self.cause = ""
        """Why the peer was given up; empty until then."""

    def silence_s(self, now_s: float) -> float:
        """Returns how long the peer has been silent, in seconds."""
        return now_s - self._heard_s

    def heard(self, at_s: float) -> None:
        """Notes that the peer or its operating system answered at ``at_s``."""
        self._heard_s = max(self._heard_s, at_s)
        if not self.is_broken:
            self._limit_s = max(self._limit_s, at_s + self._detection_s)

    def reached(self, now_s: float) -> None:
        """Notes that the peer's system accepted a new connection.

        The peer is alive, although the old connection is still suspect. Without a connection the
        limit stays: the system of another process may have accepted.
        """
        if not self.is_broken:
            self._limit_s = max(self._limit_s, now_s + self._detection_s)

    def broke(self, now_s: float, cause: str, *, is_answer: bool) -> None:
        """Notes that the connection ended, and makes the next dial due at once.

        Args:
            now_s: The time now.
            cause: How it ended.
            is_answer: Whether the peer or its system ended it, so that this is a sign of life.
        """
        if not self.is_broken:
            if is_answer:
                self.heard(now_s)
                self._limit_s = now_s + self._reconnect_s
            self.is_broken, self._has_dialled = True, False
            self._asked_s = now_s
            self._break_cause = cause
            self._pause_s = FIRST_PAUSE_S
            self._dial_at_s = now_s

    def resumed(self, now_s: float) -> None:
        """Notes that the session has a new connection."""
        self.is_broken = self.is_dialling = False
        self._dial_at_s = math.inf
        self._pause_s = FIRST_PAUSE_S
        self._heard_s = now_s
        self._limit_s = now_s + self._detection_s

    def dial_failed(
        self, now_s: float, cause: str, *, is_final: bool = False, is_there: bool = False
    ) -> None:
        """Notes that dialling failed.

        Args:
            now_s: The time now.
            cause: What went wrong.
            is_final: Whether the answer shows that the peer no longer exists.
            is_there: Whether the peer's system accepts connections although the peer does not
                speak: it may be busy. Its time limit restarts.
        """
        self.is_dialling, self._has_dialled = False, True
        if is_there:
            # Also while a connection stands: the kernel probes a peer that does not read pending
            # data ever more rarely.
            self.heard(now_s)
            if self.is_broken:
                self._limit_s = now_s + self._reconnect_s
        if is_final:
            ended = f"its connection ended ({self._break_cause}): " if self.is_broken else ""
            self._fatal = ended + cause
        elif self.is_broken:
            self._break_cause = cause
        self._dial_at_s = now_s + self._pause_s
        # Several attempts must fit into the time limit.
        longest_s = max(min(self._reconnect_s / 4, LONGEST_PAUSE_S), FIRST_PAUSE_S)
        self._pause_s = min(2 * self._pause_s, longest_s)

    def dialled(self, now_s: float) -> None:
        """Notes that a probe reached the peer, which will resume the session itself."""
        self.is_dialling, self._has_dialled = False, True
        self._dial_at_s = now_s + LONGEST_PAUSE_S
        self.heard(now_s)

    def step(self, now_s: float) -> ContactStep:
        """Returns what to do now."""
        if self.cause:
            return ContactStep.NOTHING
        late_s = now_s - self.due_s()
        if not self._fatal and late_s > LONGEST_PAUSE_S:
            self._limit_s += late_s
        elif not self._fatal and now_s - self._awaited_s > LONGEST_PAUSE_S:
            self._limit_s = max(self._limit_s, now_s + self._left_s)
        self._asked_s = now_s
        step = self._next(now_s)
        self._awaited_s = self.due_s()
        # During the first dial no limit applies, so the difference may be negative.
        self._left_s = max(self._limit_s - self._awaited_s, 0.0)
        return step

    def _next(self, now_s: float) -> ContactStep:
        self.cause = self._end(now_s)
        if self.cause:
            return ContactStep.GIVE_UP
        if not self.is_broken:
            if now_s < self._suspect_at_s():
                self._dial_at_s = math.inf
            elif math.isinf(self._dial_at_s):
                self._dial_at_s = now_s
        if not self.is_dialling and now_s >= self._dial_at_s:
            self.is_dialling = True
            return ContactStep.DIAL
        return ContactStep.NOTHING

    def due_s(self) -> float:
        """Returns the latest time at which to call ``step``, if nothing is heard."""
        if self.cause:
            return math.inf
        if self._fatal:
            return -math.inf
        # Before the first dial the limit does not apply; once passed, it would always be due.
        due_s = math.inf if self.is_broken and not self._has_dialled else self._limit_s
        if self.is_broken or self.is_dialling or not math.isinf(self._dial_at_s):
            due_s = min(due_s, self._asked_s + LONGEST_PAUSE_S)
        if not self.is_dialling:
            due_s = min(due_s, self._dial_at_s)
            if not self.is_broken and math.isinf(self._dial_at_s):
                due_s = min(due_s, self._suspect_at_s())
        return due_s

    def _suspect_at_s(self) -> float:
        return self._heard_s + self._detection_s / 2

    def _end(self, now_s: float) -> str:
        """Returns why to give up the peer, or an empty string."""
        if self._fatal:
            return self._fatal
        # If a function that holds the interpreter kept this side from dialling, dial first.
        if now_s < self._limit_s or (self.is_broken and not self._has_dialled):
            return ""
        if not self.is_broken:
            return f"nothing was heard of it for {self.silence_s(now_s):.1f} s"
        return (
            f"its connection broke and could not be made again for {self.silence_s(now_s):.1f} s: "
            f"{self._break_cause}"
        )


class Rounds:
    """The regular rounds over all sessions of one worker.

    Args:
        detection_s: How long a peer may be silent.
        probe_s: How often the kernel probes an idle connection.
    """

    def __init__(self, detection_s: float, probe_s: float) -> None:
        self.interval_s = min(probe_s, detection_s / 5)
        """How long a session may go without a look at it."""
        # Silence for half of ``detection_s`` is suspicious: the kernel's probes may come too late.
        self._prompt_after_s = detection_s / 8 if probe_s > detection_s / 4 else math.inf
        self.acknowledge_at_s = math.inf
        """When to acknowledge next; infinite before the first round."""

    def must_prompt(self, silence_s: float) -> bool:
        """Returns whether to make the system of a silent peer answer."""
        return silence_s >= self._prompt_after_s

    def must_acknowledge(self, now_s: float) -> bool:
        """Returns whether to acknowledge the data of all sessions; if so, the next time is set."""
        is_due = now_s >= self.acknowledge_at_s
        if is_due or math.isinf(self.acknowledge_at_s):
            self.acknowledge_at_s = now_s + ACKNOWLEDGE_S
        return is_due


# Messages that wait for the first connection to their receiver, in the order of sending


Outgoing = list[Buffer] | Frame
"""A message to send: bytes to write or, from a worker to itself, a frame as it is received."""


class Unsent:
    """A message that waits for the first connection to its receiver.

    Args:
        message: The message to send.
    """

    def __init__(self, message: Outgoing) -> None:
        self._message = message

    def make(self) -> Outgoing:
        """Returns the message to send; an exception raised here is passed to ``drop``."""
        return self._message

    def is_wanted(self) -> bool:
        """Whether the message is still to be sent."""
        return True

    def drop(self, error: Exception | None) -> None:
        """Called if the message will not be sent; ``error`` is None if it is not wanted."""


class UnsentMessages(deque[Unsent]):
    """The messages that wait for one receiver. Not thread-safe, but any thread may read ``len``.

    The first message is removed only after it has been written: later messages must not overtake
    it. So a message is kept as long as an earlier one is, even once there is a connection.
    """

    def keep(self, unsent: Unsent, *, is_linked: bool) -> bool:
        """Keeps a message, unless there is a connection and no earlier message waits.

        Returns:
            Whether the message is kept; if not, it may be sent at once.
        """
        if is_linked and not self:
            return False
        self.append(unsent)
        return True

    def take_unwanted(self) -> list[Unsent]:
        """Removes and returns the messages that are no longer wanted."""
        unwanted = [unsent for unsent in self if not unsent.is_wanted()]
        for unsent in unwanted:
            self.remove(unsent)
        return unwanted

    def take_all(self) -> list[Unsent]:
        """Removes and returns all messages: there will be no connection."""
        taken = list(self)
        self.clear()
        return taken
