"""The user's half: this worker's references to values on other workers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torchweft.ids import ReferenceId
from torchweft.protocol.references.delivery import Confirmed, Leak, Outbox, OwnerLost, ValueGone
from torchweft.wire.references import (
    NO_TOKEN,
    Drop,
    DropAck,
    Gone,
    Handed,
    Hold,
    HoldAck,
    NotCreated,
)


class State(enum.Enum):
    """The state of a user's reference towards its owner."""

    CREATING = enum.auto()
    """The call that makes the value is on its way, and implies the first hold."""
    HOLDING = enum.auto()
    """A hold is on its way."""
    HELD = enum.auto()
    """The owner has confirmed the hold."""
    DROPPING = enum.auto()
    """A drop is on its way."""
    GONE = enum.auto()
    """The value is gone. The entry sends nothing and waits for its handles and handovers."""


@dataclass(slots=True)
class Held:
    """A user's entry for one reference.

    ``version`` numbers the last hold or drop. ``owed`` has the handovers, as pairs of sender and
    token, to acknowledge when the owner has answered.
    """

    state: State
    version: int
    handles: int
    handovers: int = 0
    owed: tuple[tuple[int, int], ...] = ()


class HeldReferences:
    """The references of this worker to values on other workers.

    A reference has at most one request to its owner under way, also in the outbox: a drop waits
    until the hold before it is answered, and a new hold replaces a drop.
    """

    def __init__(self, worker: int, outbox: Outbox) -> None:
        self._worker = worker
        self._outbox = outbox
        self._entries: dict[ReferenceId, Held] = {}
        self._next_number: dict[int, int] = {}
        self._version = 0

    def create(self, owner: int) -> ReferenceId:
        """Names a value that a call will make on ``owner``, with one handle."""
        number = self._next_number.get(owner, 0)
        self._next_number[owner] = number + 1
        reference = ReferenceId(self._worker, owner, number)
        entry = self._entries[reference] = Held(State.CREATING, version=0, handles=1)
        if owner in self._outbox.lost:
            self._end(reference, entry)
        else:
            self._outbox.expect(reference, owner, Hold(reference, 0, NO_TOKEN))
        return reference

    def not_created(self, reference: ReferenceId) -> None:
        """Tells the owner not to wait for a creation, unless the call has arrived."""
        entry = self._entries.get(reference)
        if entry is not None and entry.state is State.CREATING:
            self._outbox.request(reference, reference.owner, NotCreated(reference))

    def none_created(self) -> None:
        """Tells the owners not to wait for any creation that has not arrived."""
        for reference in list(self._entries):
            self.not_created(reference)

    def received(self, reference: ReferenceId, sender: int, token: int) -> None:
        """Counts a handle made from a reference that came in a message."""
        entry = self._entries.get(reference)
        if entry is None:
            entry = self._entries[reference] = Held(State.DROPPING, version=0, handles=0)
            if reference.owner in self._outbox.lost:
                entry.state = State.GONE
        entry.handles += 1
        if entry.state is State.DROPPING:
            self._hold(reference, entry, sender, token)
        elif entry.state in (State.CREATING, State.HOLDING):
            # The first sender's handover would suffice, but the first sender may be lost.
            entry.owed += ((sender, token),)
        else:
            self.handed(sender, token)
            self.remind(reference)

    def remind(self, reference: ReferenceId) -> None:
        """Tells a new handle, as earlier ones, that the value is confirmed or gone."""
        state = self._entries[reference].state
        if state is State.GONE:
            self._tell_end(reference)
        elif state is State.HELD:
            self._outbox.tell(Confirmed(reference))

    def handed(self, sender: int, token: int) -> None:
        """Tells the sender of a handover that it may let the reference go."""
        self._outbox.request((Handed, sender, token), sender, Handed(token))

    def hold_ack(self, message: HoldAck) -> None:
        entry = self._find_waiting(message)
        if entry is not None:
            entry.state = State.HELD
            self._outbox.tell(Confirmed(message.reference))
            self._settle(message.reference, entry)

    def gone(self, message: Gone) -> None:
        entry = self._find_waiting(message)
        if entry is not None:
            self._end(message.reference, entry)

    def drop_ack(self, message: DropAck) -> None:
        reference = message.reference
        entry = self._entries.get(reference)
        if entry is None or entry.state is not State.DROPPING or entry.version != message.version:
            return  # a repeated answer, or an answer to a drop that a later hold has replaced
        self._outbox.answered(reference)
        del self._entries[reference]

    def change(self, reference: ReferenceId, handles: int = 0, handovers: int = 0) -> None:
        """Changes the counts that make this worker need a reference."""
        entry = self._entries[reference]
        entry.handles += handles
        entry.handovers += handovers
        self._drop_unused(reference, entry)

    def drop_all(self) -> None:
        for reference, entry in list(self._entries.items()):
            entry.handles = 0
            self._drop_unused(reference, entry)

    def peer_lost(self, peer: int) -> None:
        """Gives up the values that ``peer`` owned."""
        for reference, entry in list(self._entries.items()):
            if reference.owner == peer and entry.state is not State.GONE:
                self._end(reference, entry)

    def leaks(self) -> list[Leak]:
        return [
            Leak(reference, entry.handles, entry.handovers, ())
            for reference, entry in self._entries.items()
        ]

    def unconfirmed(self) -> int:
        """Returns how many references their owners have not confirmed yet."""
        waiting = (State.CREATING, State.HOLDING)
        return sum(entry.state in waiting for entry in self._entries.values())

    def _hold(self, reference: ReferenceId, entry: Held, sender: int, token: int) -> None:
        self._version += 1
        entry.version = self._version
        entry.state = State.HOLDING
        if sender != reference.owner:
            entry.owed += ((sender, token),)
            token = NO_TOKEN
        self._outbox.request(reference, reference.owner, Hold(reference, entry.version, token))

    def _find_waiting(self, message: HoldAck | Gone) -> Held | None:
        """Returns the entry whose hold ``message`` answers, or None."""
        entry = self._entries.get(message.reference)
        if entry is None or entry.version != message.version:
            return None
        return entry if entry.state in (State.CREATING, State.HOLDING) else None

    def _end(self, reference: ReferenceId, entry: Held) -> None:
        entry.state = State.GONE
        if entry.handles:
            self._tell_end(reference)
        self._settle(reference, entry)

    def _tell_end(self, reference: ReferenceId) -> None:
        is_lost = reference.owner in self._outbox.lost
        self._outbox.tell(OwnerLost(reference) if is_lost else ValueGone(reference))

    def _settle(self, reference: ReferenceId, entry: Held) -> None:
        """Carries out what waited for the owner's answer."""
        self._outbox.answered(reference)
        for sender, token in entry.owed:
            self.handed(sender, token)
        entry.owed = ()
        self._drop_unused(reference, entry)

    def _drop_unused(self, reference: ReferenceId, entry: Held) -> None:
        if entry.handles or entry.handovers:
            return
        if entry.state is State.HELD:
            self._version += 1
            entry.version = self._version
            entry.state = State.DROPPING
            self._outbox.request(reference, reference.owner, Drop(reference, entry.version))
        elif entry.state is State.GONE:
            del self._entries[reference]
