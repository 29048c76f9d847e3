"""Errors of dialling another worker, and what they mean to the state machine."""

from __future__ import annotations

from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.protocol.connecting import Failure
from torchweft.transport.link import LinkClosed


class HandshakeTimeout(TimeoutError):
    """A worker did not answer in time. It may be busy or stopped: it is not lost."""


class Refused(ConnectionRefusedError):
    """Nothing listens there, or the listener refuses this worker: a retry is useless."""


class Gone(Refused):
    """Nothing listens any more at the addresses of a worker of this host."""


class Crossed(ConnectionError):
    """Simultaneous open: the peer dials itself, so it lives; its connection is yet to arrive."""


_FAILURES: tuple[tuple[tuple[type[Exception], ...], Failure], ...] = (
    ((Gone,), Failure.GONE),
    ((Crossed,), Failure.CROSSED),
    ((Refused, LinkClosed, ProtocolError, ConfigurationError), Failure.REFUSED),
    ((TimeoutError,), Failure.BUSY),
)


def failure_of(error: Exception) -> Failure:
    """Returns what an error means to the state machine; any unlisted one means the network."""
    for kinds, failure in _FAILURES:
        if isinstance(error, kinds):
            return failure
    return Failure.BROKEN
