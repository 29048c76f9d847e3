"""How long and how often one side tries to make the first connection to a peer."""

from __future__ import annotations

from torchweft.protocol.connecting.actions import Busy, Failure, Lose, Step, Wait

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
