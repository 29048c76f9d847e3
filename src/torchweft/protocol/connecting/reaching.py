"""What it means that none of the addresses of a worker could be connected to."""

from __future__ import annotations

import enum

from torchweft.protocol.connecting.actions import Failure

_LOCAL = "unix:"


class Outcome(enum.Enum):
    """Why one address could not be connected to."""

    REFUSED = enum.auto()
    """The system there says that nobody listens."""
    UNSUITABLE = enum.auto()
    """This worker may not dial it: its configuration, or the address, does not allow it."""
    UNANSWERED = enum.auto()
    """The network does not carry that far now."""


class Reaching:
    """Collects what came of each address.

    Args:
        is_here: Whether the worker runs in this network, so that a refusal speaks for its process.
    """

    def __init__(self, *, is_here: bool) -> None:
        self._is_here = is_here
        self._tried: list[tuple[str, Outcome, str]] = []

    def failed(self, address: str, outcome: Outcome, reason: str) -> None:
        """Notes that one address could not be connected to."""
        self._tried.append((address, outcome, reason))

    @property
    def failure(self) -> Failure:
        """What all of that means; no address at all is a refusal."""
        outcomes = {outcome for _, outcome, _ in self._tried}
        if Outcome.UNANSWERED in outcomes:
            return Failure.BROKEN
        if self._is_here and outcomes == {Outcome.REFUSED}:
            return Failure.GONE
        return Failure.REFUSED

    @property
    def cause(self) -> str:
        """The same as a text."""
        if self.failure is Failure.GONE:
            return "its process has ended: nothing listens at its address any more"
        # Of another host, whose Unix sockets are not here, only the other addresses tell anything.
        far = [each for each in self._tried if not each[0].startswith(_LOCAL)]
        reasons = [f"{address}: {reason}" for address, _, reason in far or self._tried]
        return "; ".join(reasons) or "none of its addresses can be reached from here"
