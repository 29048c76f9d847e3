"""The errors of dialling another worker, and their meaning to the state machine."""

from __future__ import annotations

from collections.abc import Sequence

from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.protocol.connecting.actions import Failure, Lose, Step

CROSSED = "crossed"
"""The refusal of a redundant connection: the other connection stays."""
TAKEN = "taken"
"""The refusal of a worker with the name or rank of another one."""


class Unreachable(ConnectionError):
    """A peer does not answer at its addresses; the agent declares the peer lost."""


class HandshakeTimeout(TimeoutError):
    """A worker did not answer in time. It may be busy or stopped: it is not lost."""


class Refused(ConnectionRefusedError):
    """Nothing listens there, or the listener refuses this worker: a retry is useless."""


class Taken(Refused):
    """The listener refuses this worker because another worker has its name or rank."""


class Gone(Refused):
    """Nothing listens any more at the addresses of a worker of this host."""


class Crossed(ConnectionError):
    """Simultaneous open: the peer dials itself, so it lives; its connection is yet to arrive."""


_FAILURES: tuple[tuple[tuple[type[Exception], ...], Failure], ...] = (
    ((Gone,), Failure.GONE),
    ((Crossed,), Failure.CROSSED),
    ((Refused, ProtocolError, ConfigurationError), Failure.REFUSED),
    ((TimeoutError,), Failure.BUSY),
)


def failure_of(error: Exception) -> Failure:
    """Returns what an error means to the state machine; any unlisted one means the network."""
    for kinds, failure in _FAILURES:
        if isinstance(error, kinds):
            return failure
    return Failure.BROKEN


def error_of(failure: Failure, cause: str) -> Exception:
    """Returns the error for a worker that none of its addresses leads to."""
    kind = {Failure.GONE: Gone, Failure.REFUSED: Refused}.get(failure, ConnectionError)
    return kind(cause)


def check_welcome(refusal: str) -> None:
    """Raises the error that the answer to a greeting means, unless its refusal is empty.

    Raises:
        Crossed: The peer makes a connection itself.
        Taken: The peer knows another worker of this worker's name or rank.
        Refused: The peer refuses the connection for any other reason.
    """
    if refusal == CROSSED:
        raise Crossed("it makes a connection itself")
    if refusal:
        raise (Taken if refusal == TAKEN else Refused)(f"turned away: {refusal}")


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
