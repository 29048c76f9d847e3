"""The references in transit inside messages, and the handovers already received."""

from __future__ import annotations

from torchweft.ids import ReferenceId
from torchweft.protocol.references.seen import SeenNumbers


class Handovers:
    """Numbers the handovers to each peer, and remembers those received from each.

    Tokens count from 1 for every pair of sender and receiver, without gaps, so that the receiver
    can remember them in little memory.
    """

    def __init__(self) -> None:
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

    def is_new(self, sender: int, token: int) -> bool:
        """Notes a handover from ``sender``; returns whether it comes for the first time."""
        seen = self._seen.get(sender)
        if seen is None:
            seen = self._seen[sender] = SeenNumbers(first=1)
        return seen.add(token)
