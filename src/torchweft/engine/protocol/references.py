"""Keeps a remotely referenced value alive for exactly as long as a reference to it exists.

The problem: many workers hold references to a value on its *owner*, pass them on in messages, and
drop them, while messages are late and overtake each other. If each *user* sent the owner increments
and decrements, a decrement that overtakes the increment of a third worker would free a value that
is in use.

The idea: no counts travel, only states. Each user has one entry per reference, whatever the
number of its handles, and tells the owner "I hold it" or "I hold it no longer", numbered by a
version; the owner believes the highest version it has seen. A worker that hands a reference on
keeps its own entry until the owner knows the receiver's.

Guarantees, which the tests name as well: **G1** the owner learns of every user's end; **G2** a
reference handed on keeps the value alive until the receiver is registered; **G3** when a worker is
lost, the owner drops its holds, and users of values that it owned are told; **G4** a graceful
shutdown leaves no references, and reports any that are left.

The rules of this file: ``References`` is the shell's interface, made of the half of the owner, the
half of the user, and the handovers. Nothing is repeated: a session delivers each message once, or
one of the two workers is lost to the other. Received numbers take little memory
(``protocol.numbers``). ``docs/protocols/references.md`` has the scenarios.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torchweft.engine.protocol.numbers import SeenNumbers
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.messages import decode_ints, encode_ints
from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId

# Messages. Most of the eight kinds concern one reference, which its owner counts. Two concern one
# *handover*, a reference in transit inside a message, which its sender counts.

NO_TOKEN = 0
"""Stands for no handover; tokens count from 1."""

_REFERENCE = "reference"


@dataclass(slots=True)
class Hold:
    """User to owner: count me as a user. Version 0 is the hold that a creation implies.

    ``token`` ends the owner's handover that gave the user the reference, if any.
    """

    reference: ReferenceId
    version: int
    token: int


@dataclass(slots=True)
class HoldAck:
    """Owner to user: the value is made or being made, and you are counted as a user."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class Gone:
    """Owner to user: you are not counted; the value does not exist and never will again."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class Drop:
    """User to owner: count me no longer."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class DropAck:
    """Owner to user: no hold up to this version counts any more."""

    reference: ReferenceId
    version: int


@dataclass(slots=True)
class NotCreated:
    """Creator to owner: the call that would have made this value will not come."""

    reference: ReferenceId


@dataclass(slots=True)
class Handed:
    """Receiver to sender of a handover: let it go."""

    token: int


@dataclass(slots=True)
class NotHanded:
    """Sender to receiver of a handover: the message with it will not come."""

    token: int


Message = Hold | HoldAck | Gone | Drop | DropAck | NotCreated | Handed | NotHanded
"""Every message of the protocol."""


def _of_user(me: int, sender: int, message: Hold | Drop) -> bool:
    return message.reference.owner == me


def _of_creator(me: int, sender: int, message: NotCreated) -> bool:
    return message.reference.owner == me and message.reference.creator == sender


def _of_owner(me: int, sender: int, message: HoldAck | Gone | DropAck) -> bool:
    return message.reference.owner == sender


def _between_the_two(me: int, sender: int, message: Handed | NotHanded) -> bool:
    return True


REFERENCE_RULES: dict[type[Message], Callable[[int, int, Any], bool]] = {
    **dict.fromkeys((Hold, Drop), _of_user),
    NotCreated: _of_creator,
    **dict.fromkeys((HoldAck, Gone, DropAck), _of_owner),
    **dict.fromkeys((Handed, NotHanded), _between_the_two),
}
"""By type of message, whether the receiver, the sender and the message fit together."""


def check_reference_message(me: int, sender: int, message: Message) -> None:
    """Checks that ``sender`` may say to ``me`` what a message about references says.

    Raises:
        ProtocolError: It may not.
    """
    if not REFERENCE_RULES[type(message)](me, sender, message):
        raise ProtocolError(f"worker {sender} has no say in {message} at {me}")


# Actions, and what waits for an answer


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


@dataclass(slots=True)
class OnlyHere:
    """The last other worker that used an own value has dropped it; handles here keep the value."""

    reference: ReferenceId


Action = Send | ReleaseValue | Confirmed | ValueGone | OwnerLost | OnlyHere
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


class Outbox:
    """The actions to be taken next, and the references about which the owner has yet to answer."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.unanswered: set[ReferenceId] = set()
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Returns the actions collected since the last call, oldest first."""
        actions = self._actions
        self._actions = []
        return actions

    def tell(self, action: Action) -> None:
        self._actions.append(action)

    def send(self, to: int, message: Message) -> None:
        """Sends ``message``, unless its receiver is lost."""
        if to not in self.lost:
            self._actions.append(Send(to, message))

    def ask(self, message: Hold | Drop | NotCreated) -> None:
        """Asks the owner of a reference, which answers once."""
        reference = message.reference
        if reference.owner not in self.lost:
            self.unanswered.add(reference)
            self.send(reference.owner, message)


# The owner's half: the users of the values that live here


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
    """The owner's entry for one value; ``users`` has each user's version of its hold."""

    stage: Stage
    handles: int = 0
    handovers: int = 0
    users: dict[int, int] = field(default_factory=dict)


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
        # No call stands between the two: a signal handler in one would get the same number.
        number = self._next_number
        self._next_number = number + 1
        reference = ReferenceId(self._worker, self._worker, number)
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
        entry.users[user] = max(version, entry.users.get(user, 0))
        if entry.stage is Stage.CREATED:
            self._outbox.send(user, HoldAck(reference, version))

    def drop(self, user: int, message: Drop) -> None:
        reference, version = message.reference, message.version
        entry = self._entries.get(reference)
        if entry is not None:
            if entry.users.get(user, version) < version:
                del entry.users[user]
                if entry.handles and not entry.users:
                    self._outbox.tell(OnlyHere(reference))
            self._release_unused(reference, entry)
        self._outbox.send(user, DropAck(reference, version))

    def not_created(self, creator: int, message: NotCreated) -> None:
        reference = message.reference
        if self._numbers_of(creator).add(reference.number):  # Otherwise the call was answered.
            self._will_not_come(reference)
            self._outbox.send(creator, Gone(reference, 0))

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


# The user's half: this worker's references to values on other workers


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

    A drop waits until the hold before it is answered. A hold does not wait for the drop before it.
    """

    def __init__(self, worker: int, outbox: Outbox) -> None:
        self._worker = worker
        self._outbox = outbox
        self._entries: dict[ReferenceId, Held] = {}
        self._next_number: defaultdict[int, int] = defaultdict(int)
        self._version = 0

    def create(self, owner: int) -> ReferenceId:
        """Names a value that a call will make on ``owner``, with one handle."""
        number = self._next_number[owner]  # As in `OwnedValues.make`.
        self._next_number[owner] = number + 1
        reference = ReferenceId(self._worker, owner, number)
        entry = self._entries[reference] = Held(State.CREATING, version=0, handles=1)
        if owner in self._outbox.lost:
            self._end(reference, entry)
        else:
            self._outbox.unanswered.add(reference)
        return reference

    def not_created(self, reference: ReferenceId) -> None:
        """Tells the owner not to wait for a creation, unless the call has arrived."""
        entry = self._entries.get(reference)
        if entry is not None and entry.state is State.CREATING:
            self._outbox.ask(NotCreated(reference))

    def ask_again(self) -> None:
        """Repeats every request that its owner has not answered; an owner may get it twice."""
        for reference, entry in list(self._entries.items()):
            if entry.state is State.CREATING:
                self._outbox.ask(NotCreated(reference))
            elif entry.state is State.HOLDING:
                self._outbox.ask(Hold(reference, entry.version, NO_TOKEN))
            elif entry.state is State.DROPPING:
                self._outbox.ask(Drop(reference, entry.version))

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
        self._outbox.send(sender, Handed(token))

    def hold_ack(self, owner: int, message: HoldAck) -> None:
        entry = self._find_waiting(message)
        if entry is not None:
            entry.state = State.HELD
            self._outbox.tell(Confirmed(message.reference))
            self._settle(message.reference, entry)

    def gone(self, owner: int, message: Gone) -> None:
        entry = self._find_waiting(message)
        if entry is not None:
            self._end(message.reference, entry)

    def drop_ack(self, owner: int, message: DropAck) -> None:
        reference = message.reference
        entry = self._entries.get(reference)
        if entry is None or entry.state is not State.DROPPING or entry.version != message.version:
            return  # A later hold has replaced the drop.
        self._outbox.unanswered.discard(reference)
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
        self._outbox.ask(Hold(reference, entry.version, token))

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
        self._outbox.unanswered.discard(reference)
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
            self._outbox.ask(Drop(reference, entry.version))
        elif entry.state is State.GONE:
            del self._entries[reference]


# All references of one worker


class References:
    """Keeps count of the remote references of one worker: those it holds and those it owns.

    Every method is an event that the shell reports; the resulting actions are collected until
    ``take_actions``. A handle is an object that the shell gives to its user. ``creating``,
    ``owned``, ``received`` and ``handle_added`` count one handle each, and ``handle_dropped`` ends
    one. Not thread-safe: the shell has one lock around all of it.

    Args:
        worker: The id of this worker. An id names one life of a worker: a worker that comes back
            after it was lost has another id.
        arrival_s: Seconds after ``drop_all`` until all messages have arrived that were sent before.
    """

    def __init__(self, worker: int, arrival_s: float) -> None:
        self._worker = worker
        self._outbox = Outbox()
        self._arrival_s = arrival_s
        self._handovers: dict[tuple[int, int], ReferenceId] = {}
        """The references under way, by receiver and token. Tokens count from 1 for every pair of
        sender and receiver, without gaps, so that the receiver remembers them in little memory."""
        self._last_token: defaultdict[int, int] = defaultdict(int)
        self._seen: dict[int, SeenNumbers] = {}
        self._owned = OwnedValues(worker, self._outbox)
        self._held = HeldReferences(worker, self._outbox)
        self._is_closed = False
        self._take_back_at_s: float | None = None
        self._handlers: dict[type[Message], Callable[[int, Any], None]] = {
            Hold: self._on_hold,
            Drop: self._owned.drop,
            NotCreated: self._owned.not_created,
            HoldAck: self._held.hold_ack,
            Gone: self._held.gone,
            DropAck: self._held.drop_ack,
            Handed: self._on_handed,
            NotHanded: self._on_not_handed,
        }

    def take_actions(self) -> list[Action]:
        """Returns the actions collected since the last call, in order."""
        return self._outbox.take()

    # Values come into being.

    def owned(self) -> ReferenceId:
        """Names a value that this worker has made itself, and counts one handle."""
        reference = self._owned.make()
        if self._is_closed:
            self._uncount(reference)
        return reference

    def creating(self, owner: int) -> ReferenceId:
        """Names a value that a call to ``owner`` will make, and counts one handle.

        The call carries the reference; ``owner`` reports it as ``created``. A call that turns out
        not to reach the owner is reported as ``not_created``.
        """
        is_own = owner == self._worker
        reference = self._owned.make() if is_own else self._held.create(owner)
        if self._is_closed:
            self._uncount(reference)
        return reference

    def not_created(self, reference: ReferenceId) -> None:
        """Takes back a ``creating`` whose call may not have been sent; its handle stays."""
        self._held.not_created(reference)

    def created(self, reference: ReferenceId) -> bool:
        """Notes that the call which makes a value here has arrived.

        Returns:
            Whether to make the value. False if the call was seen before or taken back.
        """
        return self._owned.created(reference)

    def is_awaited(self, reference: ReferenceId) -> bool:
        """Whether a value of this worker is not made yet and its creating call may still come."""
        return self._owned.is_awaited(reference)

    # Handles come and go.

    def handle_added(self, reference: ReferenceId) -> None:
        """Counts one more handle, copied from an existing one; none after ``drop_all``."""
        if not self._is_closed:
            self._half(reference).change(reference, handles=1)

    def handle_dropped(self, reference: ReferenceId) -> None:
        """Counts one handle less; not an error after ``drop_all``."""
        if not self._is_closed:
            self._half(reference).change(reference, handles=-1)

    # References travel.

    def hand_on(self, reference: ReferenceId, to: int) -> int:
        """Begins to hand a reference, of which there is a handle here, to worker ``to``.

        Returns:
            The token that has to travel with the reference. Every such message must end in
            ``received`` or ``refused`` at ``to``, or in ``undeliverable`` here. After
            ``drop_all`` no reference is handed on: the receiver will not count it.
        """
        if to == self._worker:
            self.handle_added(reference)  # the handle that the message will become
            return NO_TOKEN
        if to in self._outbox.lost or self._is_closed:
            return NO_TOKEN
        self._half(reference).change(reference, handovers=1)
        self._last_token[to] += 1  # Without a call before the next line, as in `OwnedValues.make`.
        token = self._last_token[to]
        self._handovers[to, token] = reference
        return token

    def received(self, reference: ReferenceId, token: int, sender: int) -> bool:
        """Notes a reference that came in a message, and counts one handle.

        Returns:
            Whether a handle was counted. False if this handover was received, refused or taken
            back before, or after ``drop_all``: then no handle may be made.
        """
        if sender == self._worker:
            if not self._is_closed:
                self._half(reference).remind(reference)
            return not self._is_closed
        if not self._is_new(sender, token):
            return False
        if self._is_closed or reference.owner == self._worker:
            if not self._is_closed:
                self._owned.received(reference)
            self._held.handed(sender, token)
        else:
            self._held.received(reference, sender, token)
        return not self._is_closed

    def came_home(self, reference: ReferenceId) -> bool:
        """Notes a reference to a value of this worker in a call whose caller keeps its own handle.

        This is no handover: the caller's handle outlives the call, so the value exists. If it does
        not (the caller gave the call up), users of the handle are told that it is gone.

        Returns:
            Whether a handle was counted. False after ``drop_all``: then none may be made.

        Raises:
            ProtocolError: Another worker owns the value.
        """
        if reference.owner != self._worker:
            raise ProtocolError(f"{reference} does not belong to worker {self._worker}")
        if not self._is_closed:
            self._owned.received(reference)
        return not self._is_closed

    def refused(self, reference: ReferenceId, token: int, sender: int) -> None:
        """Notes a reference that came in a message that will not be read."""
        if sender == self._worker:
            self.handle_dropped(reference)
        elif self._is_new(sender, token):
            self._held.handed(sender, token)

    def undeliverable(self, reference: ReferenceId, token: int, to: int) -> None:
        """Takes back a handover whose message may not have been sent.

        The receiver decides: it keeps the reference if the message came first, and refuses the
        message otherwise. Until it answers, the reference counts as handed on.
        """
        if to == self._worker:
            self.handle_dropped(reference)
        elif (to, token) in self._handovers:
            self._outbox.send(to, NotHanded(token))

    # Messages, time and losses.

    def message(self, sender: int, message: Message) -> None:
        """Takes a message of this protocol.

        Raises:
            ProtocolError: The sender is not entitled to send this message.
        """
        if sender not in self._outbox.lost:
            check_reference_message(self._worker, sender, message)
            self._handlers[type(message)](sender, message)

    def tick(self, now_s: float) -> None:
        """Some time after ``drop_all``, repeats requests without an answer, and ends handovers.

        A thread that was interrupted has never sent them. May be called as often as is convenient.
        """
        if not self._is_closed:
            return
        if self._take_back_at_s is None:
            self._take_back_at_s = now_s + self._arrival_s
        elif now_s >= self._take_back_at_s:
            self._take_back_at_s = math.inf
            self._held.ask_again()
            for to, token in list(self._handovers):
                self._outbox.send(to, NotHanded(token))

    def peer_joined(self, peer: int) -> None:
        """Notes a worker that others may have spoken of as lost before it came."""
        self._outbox.lost.discard(peer)

    def peer_lost(self, peer: int) -> None:
        """Drops all holds of a lost worker, and gives up all values that it owned."""
        self._outbox.lost.add(peer)
        self._held.peer_lost(peer)
        self._owned.peer_lost(peer)
        for to, token in list(self._handovers):
            if to == peer:
                self._close_handover(peer, token)
        self._last_token.pop(peer, None)
        self._seen.pop(peer, None)

    # Shutdown.

    def drop_all(self) -> None:
        """Drops all handles at once, and counts none from now on: the end of the program."""
        self._is_closed = True
        self._held.drop_all()
        self._owned.drop_all()

    def is_settled(self) -> bool:
        """Returns whether no request waits for an answer and no handover is under way."""
        return not self._outbox.unanswered and not self._handovers

    def leaks(self) -> list[Leak]:
        """Returns the references that this worker holds, and its own that any worker holds."""
        return self._owned.leaks() + self._held.leaks()

    def census(self) -> Census:
        """Returns how many references there are, by their state."""
        shared, users = self._owned.shared()
        unconfirmed = self._held.unconfirmed()
        unanswered = len(self._outbox.unanswered)
        return Census(shared, users, unconfirmed, len(self._handovers), unanswered)

    def _half(self, reference: ReferenceId) -> OwnedValues | HeldReferences:
        return self._owned if reference.owner == self._worker else self._held

    def _uncount(self, reference: ReferenceId) -> None:
        """Drops the first handle of a new reference: after ``drop_all`` no handle counts."""
        self._half(reference).change(reference, handles=-1)

    def _is_new(self, sender: int, token: int) -> bool:
        """Notes a handover from ``sender``; returns whether it comes for the first time."""
        seen = self._seen.get(sender)
        if seen is None:
            if sender in self._outbox.lost:
                return True  # It came before the loss, once; it cannot be taken back any more.
            seen = self._seen[sender] = SeenNumbers(first=1)
        return seen.add(token)

    def _close_handover(self, to: int, token: int) -> None:
        reference = self._handovers.pop((to, token), None)
        if reference is not None:
            self._half(reference).change(reference, handovers=-1)

    # Messages.

    def _on_hold(self, sender: int, message: Hold) -> None:
        self._owned.hold(sender, message)
        # Only now: the hold must keep the value alive before the handover ends.
        self._close_handover(sender, message.token)

    def _on_handed(self, sender: int, message: Handed) -> None:
        self._close_handover(sender, message.token)

    def _on_not_handed(self, sender: int, message: NotHanded) -> None:
        # If not new, the message was received and is answered separately, unless the thread that
        # received it was interrupted.
        if self._is_new(sender, message.token) or self._is_closed:
            self._held.handed(sender, message.token)


# The encoding of messages. A batch is a flat list of signed 64-bit integers, little-endian. Each
# message is its kind, then its fields in order. A reference is its creator, owner and number.

# The numbers are the wire format: never reuse a number for another kind.
_KINDS: dict[int, type[Message]] = {
    1: Hold,
    2: HoldAck,
    3: Gone,
    4: Drop,
    5: DropAck,
    6: NotCreated,
    7: Handed,
    9: NotHanded,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_NAMES: dict[type[Message], tuple[str, ...]] = {
    kind: tuple(each.name for each in fields(kind)) for kind in _KINDS.values()
}
"""The fields of each kind. A reference, if there is one, is the first, and takes three integers."""


def encode(messages: Iterable[Message]) -> bytes:
    """Encodes a batch of messages."""
    integers: list[int] = []
    for message in messages:
        kind = type(message)
        integers.append(_NUMBERS[kind])
        for name in _NAMES[kind]:
            value = getattr(message, name)
            integers += value if name == _REFERENCE else (value,)
    return encode_ints(*integers)


def decode(data: Buffer) -> list[Message]:
    """Decodes a batch of messages.

    Raises:
        ProtocolError: ``data`` is not what ``encode`` makes.
    """
    integers = decode_ints(data)
    messages: list[Message] = []
    at = 0
    while at < len(integers):
        kind = _KINDS.get(integers[at])
        if kind is None:
            raise ProtocolError(f"no reference message has kind {integers[at]}")
        names = _NAMES[kind]
        has_reference = names[0] == _REFERENCE
        size = len(names) + 2 * has_reference
        values: list[Any] = list(integers[at + 1 : at + 1 + size])
        if len(values) < size:
            raise ProtocolError(
                f"a reference message of kind {integers[at]} ends after {len(values)} of its "
                f"{size} fields"
            )
        at += 1 + len(values)
        if has_reference:
            values[:3] = [ReferenceId(*values[:3])]
        messages.append(kind(*values))
    return messages
