"""What the machine asks of the shell around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchweft.ids import ReferenceId
from torchweft.wire.references import Message


@dataclass(slots=True)
class Send:
    """Send ``message`` to worker ``to``; soon, but messages may wait for one another."""

    to: int
    message: Message


@dataclass(slots=True)
class ReleaseValue:
    """Forget the value that this worker owns: nobody can ask for it any more."""

    reference: ReferenceId


@dataclass(slots=True)
class Confirmed:
    """The owner knows of the value, and counts this worker as a user."""

    reference: ReferenceId


@dataclass(slots=True)
class ValueGone:
    """There is no value behind the reference, nor will there be; handles are of no use."""

    reference: ReferenceId


@dataclass(slots=True)
class OwnerLost:
    """The owner is lost, and the value with it; handles are of no use."""

    reference: ReferenceId


Action = Send | ReleaseValue | Confirmed | ValueGone | OwnerLost
"""Every action of the machine."""


class Census(NamedTuple):
    """Says how many references one worker has to do with, and how far they have come.

    Attributes:
        shared: Values of this worker that others use or are being handed.
        users: How many other workers use them, added up.
        unconfirmed: Values of others that are used here, and of which their owners do not know yet.
        handovers: References in messages of this worker that are not yet answered for.
        unanswered: Messages about references to which the answers have not come.
    """

    shared: int
    users: int
    unconfirmed: int
    handovers: int
    unanswered: int


class Leak(NamedTuple):
    """Says what keeps one reference from being forgotten.

    Attributes:
        reference: The reference.
        handles: Handles to it on this worker.
        handovers: Messages of this worker that carry it, not yet answered for.
        users: Other workers that hold it, where this worker is its owner.
    """

    reference: ReferenceId
    handles: int
    handovers: int
    users: tuple[int, ...]
