"""Decides which addresses of a worker to dial, and what it means that none answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.protocol.connecting.actions import Failure

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
