"""Keeps a remotely referenced value alive for exactly as long as a reference to it exists.

The problem: many workers hold references to a value on its *owner*, pass them on in messages, and
drop them, while the network delays, repeats, reorders and loses their messages. If each *user* sent
the owner increments and decrements, a decrement that overtakes the increment of a third worker
would free a value that is in use; a repeated decrement would free it twice.

The idea: no counts travel, only states. Each user has one entry per reference, whatever the
number of its handles, and tells the owner "I hold it" or "I hold it no longer", numbered by a
version, until the owner has answered; the owner believes the highest version it has seen. A worker
that hands a reference on keeps its own entry until the owner knows the receiver's.

Guarantees, which the tests name as well: **G1** the owner learns of every user's end; **G2** a
reference handed on keeps the value alive until the receiver is registered; **G3** when a worker is
lost, the owner drops its holds, and users of values that it owned are told; **G4** a graceful
shutdown leaves no references, and reports any that are left.

The rules of this file: it is the shell's interface, made of the two halves in ``reference_halves``
and the handovers; every request is repeated until answered; received numbers take little memory
(``protocol.numbers``). ``docs/protocols/references.md`` has the scenarios.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torchweft.errors import ProtocolError
from torchweft.ids import ReferenceId
from torchweft.protocol.entitlement import check_reference_message
from torchweft.protocol.numbers import SeenNumbers
from torchweft.protocol.reference_halves import (
    Action,
    Census,
    HeldReferences,
    Leak,
    Outbox,
    OwnedValues,
)
from torchweft.wire.references import (
    NO_TOKEN,
    Drop,
    DropAck,
    Gone,
    Handed,
    HandedAck,
    Hold,
    HoldAck,
    Message,
    NotCreated,
    NotHanded,
)

_INTERVALS_TO_ARRIVE = 2
"""Ends of intervals after ``drop_all`` until all messages have arrived that were sent before it."""


class References:
    """Keeps count of the remote references of one worker: those it holds and those it owns.

    Every method is an event that the shell reports; the resulting actions are collected until
    ``take_actions``. A handle is an object that the shell gives to its user. ``creating``,
    ``owned``, ``received`` and ``handle_added`` count one handle each, and ``handle_dropped`` ends
    one. Not thread-safe: the shell has one lock around all of it.

    Args:
        worker: The id of this worker. An id names one life of a worker: a worker that comes back
            after it was lost has another id.
        resend_s: Seconds after which a request that has no answer is sent again.
    """

    def __init__(self, worker: int, resend_s: float) -> None:
        self._worker = worker
        self._outbox = Outbox(resend_s)
        self._handovers: dict[tuple[int, int], ReferenceId] = {}
        """The references under way, by receiver and token. Tokens count from 1 for every pair of
        sender and receiver, without gaps, so that the receiver remembers them in little memory."""
        self._last_token: defaultdict[int, int] = defaultdict(int)
        self._seen: dict[int, SeenNumbers] = {}
        self._owned = OwnedValues(worker, self._outbox)
        self._held = HeldReferences(worker, self._outbox)
        self._is_closed = False
        self._intervals_closed = 0
        self._handlers: dict[type[Message], Callable[[int, Any], None]] = {
            Hold: self._on_hold,
            Drop: self._owned.drop,
            NotCreated: self._owned.not_created,
            HoldAck: self._held.hold_ack,
            Gone: self._held.gone,
            DropAck: self._held.drop_ack,
            Handed: self._on_handed,
            HandedAck: self._on_handed_ack,
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
            self._outbox.request((NotHanded, to, token), to, NotHanded(token))

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
        """Resends overdue requests; may be called as often as is convenient.

        After ``drop_all`` it also takes back, once, what the others have not confirmed within a
        whole interval: a thread that was interrupted has never sent it.
        """
        if self._outbox.tick(now_s) and self._is_closed:
            self._intervals_closed += 1
            if self._intervals_closed == _INTERVALS_TO_ARRIVE:
                self._held.none_created()
                for to, token in list(self._handovers):
                    self._outbox.request((NotHanded, to, token), to, NotHanded(token))

    def peer_joined(self, peer: int) -> None:
        """Notes a worker that others may have spoken of as lost before it came."""
        self._outbox.lost.discard(peer)

    def peer_lost(self, peer: int) -> None:
        """Drops all holds of a lost worker, and gives up all values that it owned."""
        self._outbox.lose(peer)
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
        return not self._outbox and not self._handovers

    def leaks(self) -> list[Leak]:
        """Returns the references that this worker holds, and its own that any worker holds."""
        return self._owned.leaks() + self._held.leaks()

    def census(self) -> Census:
        """Returns how many references there are, by their state."""
        shared, users = self._owned.shared()
        unconfirmed = self._held.unconfirmed()
        return Census(shared, users, unconfirmed, len(self._handovers), len(self._outbox))

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
            self._outbox.answered((NotHanded, to, token))
            self._half(reference).change(reference, handovers=-1)

    # Messages.

    def _on_hold(self, sender: int, message: Hold) -> None:
        self._owned.hold(sender, message)
        # Only now: the hold must keep the value alive before the handover ends.
        self._close_handover(sender, message.token)

    def _on_handed(self, sender: int, message: Handed) -> None:
        self._close_handover(sender, message.token)
        self._outbox.send(sender, HandedAck(message.token))

    def _on_handed_ack(self, sender: int, message: HandedAck) -> None:
        self._outbox.answered((Handed, sender, message.token))

    def _on_not_handed(self, sender: int, message: NotHanded) -> None:
        # If not new, the message was received and is answered separately, unless the thread that
        # received it was interrupted.
        if self._is_new(sender, message.token) or self._is_closed:
            self._held.handed(sender, message.token)
