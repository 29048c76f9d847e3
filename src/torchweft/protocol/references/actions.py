"""The actions and reports that the machine gives to its shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchweft.ids import ReferenceId
from torchweft.wire.references import Message


@dataclass(slots=True)
class Send:
    """Send ``message`` to worker ``to`` soon; messages may be batched."""

    to: int
    message: Message


@dataclass(slots=True)
class ReleaseValue:
    """Forget a value that this worker owns: no reference to it is left."""

    reference: ReferenceId


@dataclass(slots=True)
class Confirmed:
    """The owner knows of the value, and counts this worker as a user."""

    reference: ReferenceId


@dataclass(slots=True)
class ValueGone:
    """The reference has no value and never will have; handles are useless."""

    reference: ReferenceId


@dataclass(slots=True)
class OwnerLost:
    """The owner is lost, and the value with it; handles are useless."""

    reference: ReferenceId


Action = Send | ReleaseValue | Confirmed | ValueGone | OwnerLost
"""Every action of the machine."""


class Census(NamedTuple):
    """Counts the references that concern one worker, by their state.

    Attributes:
        shared: Values of this worker that others use or are being handed.
        users: The number of other workers that use them, summed over the values.
        unconfirmed: Values of others that are used here but whose owners do not know of it yet.
        handovers: References in messages of this worker that are not acknowledged yet.
        unanswered: Requests about references that are not answered yet.
    """

    shared: int
    users: int
    unconfirmed: int
    handovers: int
    unanswered: int


class Leak(NamedTuple):
    """Lists what keeps one reference alive.

    Attributes:
        reference: The reference.
        handles: Handles to it on this worker.
        handovers: Messages of this worker that carry it and are not acknowledged yet.
        users: Other workers that hold it, if this worker is its owner.
    """

    reference: ReferenceId
    handles: int
    handovers: int
    users: tuple[int, ...]
