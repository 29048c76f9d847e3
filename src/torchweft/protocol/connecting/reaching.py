"""Classifies the failure to connect to any address of a worker."""

from __future__ import annotations

import enum

from torchweft.protocol.connecting.actions import Failure

_LOCAL = "unix:"


class Outcome(enum.Enum):
    """Why connecting to one address failed."""

    REFUSED = enum.auto()
    """The remote system says that no process listens there."""
    UNSUITABLE = enum.auto()
    """This worker's configuration, or the address itself, does not allow dialling it."""
    UNANSWERED = enum.auto()
    """The network does not reach the address now."""


class Reaching:
    """Collects the outcome for each address.

    Args:
        is_here: Whether the worker shares this network stack, so that a refusal shows its death.
    """

    def __init__(self, *, is_here: bool) -> None:
        self._is_here = is_here
        self._tried: list[tuple[str, Outcome, str]] = []

    def failed(self, address: str, outcome: Outcome, reason: str) -> None:
        """Notes that connecting to one address failed."""
        self._tried.append((address, outcome, reason))

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
        """The combined failure as a text."""
        if self.failure is Failure.GONE:
            return "its process has ended: nothing listens at its address any more"
        # Another host's Unix sockets do not exist here: only its other addresses are informative.
        far = [each for each in self._tried if not each[0].startswith(_LOCAL)]
        reasons = [f"{address}: {reason}" for address, _, reason in far or self._tried]
        return "; ".join(reasons) or "none of its addresses can be reached from here"
