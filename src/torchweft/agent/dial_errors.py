"""Why an attempt to dial another worker came to nothing, as errors and for the machine."""

from __future__ import annotations

from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.protocol.connecting import Failure
from torchweft.transport.link import LinkClosed


class Speechless(TimeoutError):
    """A worker did not speak in time. It may be busy, or stopped: it is not lost."""


class Refused(ConnectionRefusedError):
    """Nobody listens there, or whoever does turns this worker away: trying again is no use."""


class Gone(Refused):
    """Nobody listens any more where a worker of this host did."""


class Crossed(ConnectionError):
    """The other side makes a connection itself, which has not come yet: it lives."""


_FAILURES: tuple[tuple[tuple[type[Exception], ...], Failure], ...] = (
    ((Gone,), Failure.GONE),
    ((Crossed,), Failure.CROSSED),
    ((Refused, LinkClosed, ProtocolError, ConfigurationError), Failure.REFUSED),
    ((TimeoutError,), Failure.BUSY),
)


def failure_of(error: Exception) -> Failure:
    """Returns what the machine is told of an error; of any other one, the network is the reason."""
    for kinds, failure in _FAILURES:
        if isinstance(error, kinds):
            return failure
    return Failure.BROKEN
