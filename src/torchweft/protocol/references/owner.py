"""The owner's half: the users of the values that live here."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torchweft.ids import ReferenceId
from torchweft.protocol.numbers import SeenNumbers
from torchweft.protocol.references.delivery import Leak, Outbox, ReleaseValue, ValueGone
from torchweft.wire.references import Drop, DropAck, Gone, Hold, HoldAck, NotCreated


class Stage(enum.Enum):
    """The stage of an owned value."""

    AWAITED = enum.auto()
    """A hold or a reference arrived before the call that makes it."""
    CREATED = enum.auto()
    """It is made or being made."""
    GONE = enum.auto()
    """It was never made and will not be, or was released; only handles here are left."""


@dataclass(slots=True)
class Owned:
    """The owner's entry for one value.

    ``users`` has each user's version of its hold, ``dropped`` each former user's version of its
    drop: a late hold of a smaller version must not count.
    """

    stage: Stage
    handles: int = 0
    handovers: int = 0
    users: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)


class OwnedValues:
    """The values that this worker owns and to which references exist."""

    def __init__(self, worker: int, outbox: Outbox) -> None:
        self._worker = worker
        self._outbox = outbox
        self._entries: dict[ReferenceId, Owned] = {}
        self._next_number = 0
        self._created: dict[int, SeenNumbers] = {}

    def make(self) -> ReferenceId:
        """Registers a value made by this worker itself, with one handle."""
        reference = ReferenceId(self._worker, self._worker, self._next_number)
        self._next_number += 1
        self._entries[reference] = Owned(Stage.CREATED, handles=1)
        return reference

    def created(self, reference: ReferenceId) -> bool:
        """Registers a value that another worker's call makes; returns False if not new."""
        creator = reference.creator
        if creator == self._worker:
            return True  # a worker's calls to itself come once, and `make` registered the value
        if creator in self._outbox.lost or not self._numbers_of(creator).add(reference.number):
            return False
        entry = self._entries.get(reference)
        if entry is None:
            entry = self._entries[reference] = Owned(Stage.CREATED)
        entry.stage = Stage.CREATED
        entry.users.setdefault(creator, 0)
        for user, version in entry.users.items():
            self._outbox.send(user, HoldAck(reference, version))
        return True

    def is_awaited(self, reference: ReferenceId) -> bool:
        """Whether the call that makes a value may still come."""
        creator = reference.creator
        return (
            creator != self._worker
            and creator not in self._outbox.lost
            and reference.number not in self._numbers_of(creator)
        )

    def received(self, reference: ReferenceId) -> None:
        """Counts a handle made from a reference that came back to its owner."""
        entry = self._find_or_await(reference)
        if entry is None:
            entry = self._entries[reference] = Owned(Stage.GONE)
        entry.handles += 1
        self.remind(reference)

    def remind(self, reference: ReferenceId) -> None:
        """Tells a new handle, as earlier ones were told, that the value is gone."""
        if self._entries[reference].stage is Stage.GONE:
            self._outbox.tell(ValueGone(reference))

    def hold(self, user: int, message: Hold) -> None:
        reference, version = message.reference, message.version
        entry = self._find_or_await(reference)
        if entry is None or entry.stage is Stage.GONE:
            self._outbox.send(user, Gone(reference, version))
            return
        if version > entry.dropped.get(user, -1):
            entry.users[user] = max(version, entry.users.get(user, 0))
        if entry.stage is Stage.CREATED:
            self._outbox.send(user, HoldAck(reference, version))

    def drop(self, user: int, message: Drop) -> None:
        reference, version = message.reference, message.version
        entry = self._entries.get(reference)
        if entry is not None:
            entry.dropped[user] = max(version, entry.dropped.get(user, 0))
            if entry.users.get(user, version) < version:
                del entry.users[user]
            self._release_unused(reference, entry)
        self._outbox.send(user, DropAck(reference, version))

    def not_created(self, creator: int, message: NotCreated) -> None:
        reference = message.reference
        if self._numbers_of(creator).add(reference.number):
            self._will_not_come(reference)
        entry = self._entries.get(reference)
        if entry is None or entry.stage is Stage.GONE:
            self._outbox.send(creator, Gone(reference, 0))
        else:  # the call came before this message
            self._outbox.send(creator, HoldAck(reference, 0))

    def change(self, reference: ReferenceId, handles: int = 0, handovers: int = 0) -> None:
        """Changes the counts that keep a value alive here."""
        entry = self._entries[reference]
        entry.handles += handles
        entry.handovers += handovers
        self._release_unused(reference, entry)

    def drop_all(self) -> None:
        for reference, entry in list(self._entries.items()):
            entry.handles = 0
            self._release_unused(reference, entry)

    def peer_lost(self, peer: int) -> None:
        """Drops the holds of ``peer``, and gives up values that its calls were to make."""
        self._created.pop(peer, None)
        for reference, entry in list(self._entries.items()):
            entry.users.pop(peer, None)
            entry.dropped.pop(peer, None)
            if entry.stage is Stage.AWAITED and reference.creator == peer:
                self._will_not_come(reference)
            else:
                self._release_unused(reference, entry)

    def leaks(self) -> list[Leak]:
        return [
            Leak(reference, entry.handles, entry.handovers, tuple(sorted(entry.users)))
            for reference, entry in self._entries.items()
        ]

    def shared(self) -> tuple[int, int]:
        """Returns how many values others use or are being handed, and the sum of their users."""
        entries = [entry for entry in self._entries.values() if entry.users or entry.handovers]
        return len(entries), sum(len(entry.users) for entry in entries)

    def _numbers_of(self, creator: int) -> SeenNumbers:
        numbers = self._created.get(creator)
        if numbers is None:
            numbers = self._created[creator] = SeenNumbers(first=0)
        return numbers

    def _find_or_await(self, reference: ReferenceId) -> Owned | None:
        """Returns the entry, a new one if the creation may still come; None if it is gone."""
        entry = self._entries.get(reference)
        if entry is None and self.is_awaited(reference):
            entry = self._entries[reference] = Owned(Stage.AWAITED)
        return entry

    def _will_not_come(self, reference: ReferenceId) -> None:
        # Also without a handle here: a thread may be waiting for the value to be made.
        self._outbox.tell(ValueGone(reference))
        entry = self._entries.get(reference)
        if entry is None:
            return
        entry.stage = Stage.GONE
        for user, version in entry.users.items():
            self._outbox.send(user, Gone(reference, version))
        entry.users.clear()
        self._release_unused(reference, entry)

    def _release_unused(self, reference: ReferenceId, entry: Owned) -> None:
        if entry.users or entry.handles or entry.handovers:
            return
        del self._entries[reference]
        if entry.stage is Stage.CREATED:
            self._outbox.tell(ReleaseValue(reference))
