"""Delivery by a network that loses and repeats messages: actions, requests, and handovers.

The machine's actions and reports; the requests that are repeated until answered; the references in
transit inside messages.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from torchweft.ids import ReferenceId
from torchweft.protocol.numbers import SeenNumbers, WorkerIds
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


class Outbox:
    """The actions to be taken next, and the requests that are not answered yet.

    Unanswered requests are kept in two generations. At the end of each interval the old requests
    are sent again and the young ones become old. So a request is repeated one to two intervals
    after it was made, carries no time, and costs one entry in a ``dict``.

    Args:
        resend_s: The interval, in seconds.
    """

    def __init__(self, resend_s: float) -> None:
        self.lost = WorkerIds()
        self._actions: list[Action] = []
        self._resend_s = resend_s
        self._resend_at_s: float | None = None
        self._young: dict[Hashable, Send] = {}
        self._old: dict[Hashable, Send] = {}

    def take(self) -> list[Action]:
        """Returns the actions collected since the last call, oldest first."""
        actions = self._actions
        self._actions = []
        return actions

    def tell(self, action: Action) -> None:
        self._actions.append(action)

    def send(self, to: int, message: Message) -> None:
        """Sends ``message`` once."""
        if to not in self.lost:
            self._actions.append(Send(to, message))

    def request(self, key: Hashable, to: int, message: Message) -> None:
        """Sends ``message`` until ``key`` is answered; replaces the earlier request of ``key``."""
        self.expect(key, to, message)
        self.send(to, message)

    def expect(self, key: Hashable, to: int, message: Message) -> None:
        """Does as ``request``, but does not send at once: another message asks the same."""
        if to not in self.lost:
            self._old.pop(key, None)
            self._young[key] = Send(to, message)

    def answered(self, key: Hashable) -> None:
        """Ends a request; does nothing if it has ended before."""
        if self._young.pop(key, None) is None:
            self._old.pop(key, None)

    def tick(self, now_s: float) -> bool:
        """Repeats requests that have waited for an interval or more.

        Returns:
            Whether an interval has ended.
        """
        is_end = self._resend_at_s is not None
        if self._resend_at_s is not None:
            if now_s < self._resend_at_s:
                return False
            self._actions.extend(self._old.values())
            self._old.update(self._young)
            self._young.clear()
        self._resend_at_s = now_s + self._resend_s
        return is_end

    def lose(self, peer: int) -> None:
        """Ends all requests to ``peer``, and sends no more messages to it."""
        self.lost.add(peer)
        for requests in (self._young, self._old):
            for key in [key for key, request in requests.items() if request.to == peer]:
                del requests[key]

    def __len__(self) -> int:
        """Returns how many requests are unanswered."""
        return len(self._young) + len(self._old)


class Handovers:
    """Numbers the handovers to each peer, and remembers those received from each.

    Tokens count from 1 for every pair of sender and receiver, without gaps, so that the receiver
    can remember them in little memory.

    Args:
        lost: The lost workers. Nothing is remembered of them.
    """

    def __init__(self, lost: WorkerIds) -> None:
        self._lost = lost
        self._outstanding: dict[tuple[int, int], ReferenceId] = {}
        self._last_token: dict[int, int] = {}
        self._seen: dict[int, SeenNumbers] = {}

    def __len__(self) -> int:
        return len(self._outstanding)

    def open(self, reference: ReferenceId, to: int) -> int:
        """Begins a handover and returns its token."""
        token = self._last_token[to] = self._last_token.get(to, 0) + 1
        self._outstanding[to, token] = reference
        return token

    def is_open(self, to: int, token: int) -> bool:
        return (to, token) in self._outstanding

    def close(self, to: int, token: int) -> ReferenceId | None:
        """Ends a handover; returns its reference, or None if it has ended before."""
        return self._outstanding.pop((to, token), None)

    def tokens_to(self, peer: int) -> list[int]:
        """Returns the tokens of the open handovers to ``peer``."""
        return [token for to, token in self._outstanding if to == peer]

    def lose(self, peer: int) -> None:
        """Forgets the numbers of a lost worker; its open handovers must have been closed."""
        self._last_token.pop(peer, None)
        self._seen.pop(peer, None)

    def all(self) -> list[tuple[int, int]]:
        """Returns receiver and token of each open handover."""
        return list(self._outstanding)

    def is_new(self, sender: int, token: int) -> bool:
        """Notes a handover from ``sender``; returns whether it comes for the first time."""
        seen = self._seen.get(sender)
        if seen is None:
            if sender in self._lost:
                return True  # It came before the loss, once; it cannot be taken back any more.
            seen = self._seen[sender] = SeenNumbers(first=1)
        return seen.add(token)
