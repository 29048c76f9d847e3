"""Whether one side of a session still has contact with the other: when to dial, when to give up.

The shell reports what it notices; the machine says what to do. It makes no difference between
the two sides of a session, but that only the one which dialled it first resumes it: the other one
asks it to, see ``docs/protocols/sessions.md``.
"""

from __future__ import annotations

import enum
import math

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class Step(enum.Enum):
    """What to do now."""

    NOTHING = enum.auto()
    DIAL = enum.auto()
    """Try to reach the other side over a new connection, and report ``dial_failed`` if in vain."""
    GIVE_UP = enum.auto()
    """The other side is lost; ``cause`` says why. Nothing follows."""


class Contact:
    """What one side knows of its contact with the other.

    Contact is given up when nothing was heard of the other side for ``detection_s``, or when the
    other side, or its system, ended the connection and none could be made for ``reconnect_s``.
    When half of the detection time has passed in silence, a new connection is tried beside the old
    one, which may be the reason of the silence.

    Time in which this side was kept from trying, because its process was stopped or held up, does
    not count: when the shell asks more than a second later than ``due_s`` said, all limits move on
    by that. Otherwise a process that was stopped with a dead connection would give up as soon as it
    goes on. Its system may have heard of the other side meanwhile, which makes the step due later.
    So what was due and left after the last step counts as well.

    Args:
        now_s: The time now; contact has just been made.
        detection_s: See above.
        reconnect_s: See above.
    """

    def __init__(self, now_s: float, detection_s: float, reconnect_s: float) -> None:
        self._detection_s = detection_s
        self._reconnect_s = reconnect_s
        self._heard_s = now_s
        self._is_broken = False
        self._limit_s = now_s + detection_s
        self._asked_s = now_s
        self._awaited_s, self._left_s = math.inf, detection_s
        self._break_cause = ""
        self._dial_at_s = math.inf
        self._pause_s = FIRST_PAUSE_S
        self._is_dialling = self._has_dialled = False
        self._fatal = ""
        self.cause = ""
        """Why contact was given up."""

    @property
    def is_broken(self) -> bool:
        """Whether there is no connection now."""
        return self._is_broken

    @property
    def is_dialling(self) -> bool:
        """Whether somebody was told to dial, has not reported yet, and should do so still."""
        return self._is_dialling

    def silence_s(self, now_s: float) -> float:
        """Returns for how long nothing was heard."""
        return now_s - self._heard_s

    def heard(self, at_s: float) -> None:
        """Notes that the other side, or the system that it runs on, answered at ``at_s``."""
        self._heard_s = max(self._heard_s, at_s)
        if not self._is_broken:
            self._limit_s = max(self._limit_s, at_s + self._detection_s)

    def broke(self, now_s: float, cause: str, *, is_answer: bool) -> None:
        """Notes that the connection ended: it is dialled again at once.

        Args:
            now_s: The time now.
            cause: What was noticed.
            is_answer: Whether the other side, or its system, has ended it; rather than silence.
        """
        if not self._is_broken:
            if is_answer:
                self.heard(now_s)
                self._limit_s = now_s + self._reconnect_s
            self._is_broken, self._has_dialled = True, False
            self._asked_s = now_s
            self._break_cause = cause
            self._pause_s = FIRST_PAUSE_S
            self._dial_at_s = now_s

    def resumed(self, now_s: float) -> None:
        """Notes that there is a new connection."""
        self._is_broken = self._is_dialling = False
        self._dial_at_s = math.inf
        self._pause_s = FIRST_PAUSE_S
        self._heard_s = now_s
        self._limit_s = now_s + self._detection_s

    def dial_failed(
        self, now_s: float, cause: str, *, is_final: bool = False, is_there: bool = False
    ) -> None:
        """Notes that dialling was in vain.

        Args:
            now_s: The time now.
            cause: What went wrong.
            is_final: Whether the answer shows that the other side is not there any more.
            is_there: Whether the system of the other side says that it listens, though it does
                not speak: it may be busy. The time that it has begins anew.
        """
        self._is_dialling, self._has_dialled = False, True
        if is_there:
            # Also where a connection stands: when its peer does not read what waits for it, the
            # kernel probes it more and more rarely.
            self.heard(now_s)
            if self._is_broken:
                self._limit_s = now_s + self._reconnect_s
        if is_final:
            ended = f"its connection ended ({self._break_cause}): " if self._is_broken else ""
            self._fatal = ended + cause
        elif self._is_broken:
            self._break_cause = cause
        self._dial_at_s = now_s + self._pause_s
        # Several attempts at least must fit into the time that there is.
        longest_s = max(min(self._reconnect_s / 4, LONGEST_PAUSE_S), FIRST_PAUSE_S)
        self._pause_s = min(2 * self._pause_s, longest_s)

    def dialled(self, now_s: float) -> None:
        """Notes that the other side was reached, and is going to resume the session itself."""
        self._is_dialling, self._has_dialled = False, True
        self._dial_at_s = now_s + LONGEST_PAUSE_S
        self.heard(now_s)

    def step(self, now_s: float) -> Step:
        """Returns what to do now."""
        if self.cause:
            return Step.NOTHING
        late_s = now_s - self.due_s()
        if not self._fatal and late_s > LONGEST_PAUSE_S:
            self._limit_s += late_s
        elif not self._fatal and now_s - self._awaited_s > LONGEST_PAUSE_S:
            self._limit_s = max(self._limit_s, now_s + self._left_s)
        self._asked_s = now_s
        step = self._next(now_s)
        self._awaited_s = self.due_s()
        # While somebody dials for the first time there is no limit yet.
        self._left_s = max(self._limit_s - self._awaited_s, 0.0)
        return step

    def _next(self, now_s: float) -> Step:
        self.cause = self._end(now_s)
        if self.cause:
            return Step.GIVE_UP
        if not self._is_broken:
            if now_s < self._suspect_at_s():
                self._dial_at_s = math.inf
            elif math.isinf(self._dial_at_s):
                self._dial_at_s = now_s
        if not self._is_dialling and now_s >= self._dial_at_s:
            self._is_dialling = True
            return Step.DIAL
        return Step.NOTHING

    def due_s(self) -> float:
        """Returns when ``step`` has something to say at the latest, if nothing is heard."""
        if self.cause:
            return math.inf
        if self._fatal:
            return -math.inf
        # The limit is none yet for whoever has not dialled: it would be due all the time.
        due_s = math.inf if self._is_broken and not self._has_dialled else self._limit_s
        if self._is_broken or self._is_dialling or not math.isinf(self._dial_at_s):
            due_s = min(due_s, self._asked_s + LONGEST_PAUSE_S)
        if not self._is_dialling:
            due_s = min(due_s, self._dial_at_s)
            if not self._is_broken and math.isinf(self._dial_at_s):
                due_s = min(due_s, self._suspect_at_s())
        return due_s

    def _suspect_at_s(self) -> float:
        return self._heard_s + self._detection_s / 2

    def _end(self, now_s: float) -> str:
        """Returns why there is no hope, or nothing."""
        if self._fatal:
            return self._fatal
        # Whoever was kept from dialling, by a function that holds the interpreter, dials first.
        if now_s < self._limit_s or (self._is_broken and not self._has_dialled):
            return ""
        if not self._is_broken:
            return f"nothing was heard of it for {self.silence_s(now_s):.1f} s"
        return (
            f"its connection broke and could not be made again for {self.silence_s(now_s):.1f} s: "
            f"{self._break_cause}"
        )
