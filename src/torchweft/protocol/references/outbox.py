"""Collects the machine's actions, and repeats unanswered requests."""

from __future__ import annotations

from collections.abc import Hashable

from torchweft.protocol.references.actions import Action, Send
from torchweft.wire.references import Message


class Outbox:
    """The actions to be taken next, and the requests that are not answered yet.

    Unanswered requests are kept in two generations. At the end of each interval the old requests
    are sent again and the young ones become old. So a request is repeated one to two intervals
    after it was made, carries no time, and costs one entry in a ``dict``.

    Args:
        resend_s: The interval, in seconds.
    """

    def __init__(self, resend_s: float) -> None:
        self.lost: set[int] = set()
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

    def tick(self, now_s: float) -> None:
        """Repeats requests that have waited for an interval or more."""
        if self._resend_at_s is not None:
            if now_s < self._resend_at_s:
                return
            self._actions.extend(self._old.values())
            self._old.update(self._young)
            self._young.clear()
        self._resend_at_s = now_s + self._resend_s

    def lose(self, peer: int) -> None:
        """Ends all requests to ``peer``, and sends no more messages to it."""
        self.lost.add(peer)
        for requests in (self._young, self._old):
            for key in [key for key, request in requests.items() if request.to == peer]:
                del requests[key]

    def __len__(self) -> int:
        """Returns how many requests are unanswered."""
        return len(self._young) + len(self._old)

    def is_answered(self) -> bool:
        """Returns whether all requests are answered."""
        return not self._young and not self._old
