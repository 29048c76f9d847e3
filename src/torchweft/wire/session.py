"""Sessions: a stream of bytes between two workers that outlives the connections it takes.

Each side counts the bytes of both directions. The count is the *position*: it numbers every byte,
and with it every frame. The sender keeps what the receiver has not acknowledged. After a break each
side says how far it has received, and the other goes on from there, be it in the middle of a
frame. So what a session carries arrives exactly once and in order, or the session ends.

Nothing is copied: what is kept are the buffers that were sent. See ``docs/protocols/sessions.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torchweft.errors import ProtocolError
from torchweft.wire.frames import Buffer

ACKNOWLEDGE_BYTES = 1 << 16
"""How much may be received before it is acknowledged; what is left is, after a while."""
LEAST_BYTES = 24
"""What is no more than an acknowledgement is not worth one: two that acknowledge each other's
would go on for ever."""


class Outgoing:
    """What one side has sent, as far as it may have to be sent again.

    One thread at a time may ``keep``, and one ``acknowledge`` meanwhile; nothing else may happen
    during ``since``.
    """

    __slots__ = ("_kept", "acknowledged", "position")

    def __init__(self) -> None:
        self.position = 0
        """How many bytes were ever given to ``keep``."""
        self.acknowledged = 0
        """How many of them the receiver has said that it has."""
        # Each buffer with the position of its end.
        self._kept: deque[tuple[int, Buffer]] = deque()

    @property
    def kept_bytes(self) -> int:
        """How many bytes the receiver may not have."""
        return self.position - self.acknowledged

    def keep(self, parts: Sequence[Buffer]) -> None:
        """Keeps buffers, which follow all earlier ones, until they are acknowledged."""
        position = self.position
        for part in parts:
            position += len(part)
            self._kept.append((position, part))
        self.position = position

    def acknowledge(self, position: int) -> None:
        """Lets go of all before ``position``.

        Raises:
            ProtocolError: So much was never sent.
        """
        if position > self.position:
            raise ProtocolError(
                f"{position} bytes are acknowledged, of {self.position} that were sent"
            )
        if position > self.acknowledged:
            self.acknowledged = position
            kept = self._kept
            while kept and kept[0][0] <= position:
                kept.popleft()

    def since(self, position: int) -> list[Buffer]:
        """Returns what is to be sent, perhaps again, from ``position`` on.

        Raises:
            ProtocolError: That is not kept any more, or was never sent.
        """
        if not self.acknowledged <= position <= self.position:
            raise ProtocolError(
                f"the stream cannot go on at byte {position}: bytes {self.acknowledged} to "
                f"{self.position} are kept"
            )
        rest: list[Buffer] = []
        for end, part in self._kept:
            if end - len(part) >= position:
                rest.append(part)
            elif end > position:
                rest.append(memoryview(part)[len(part) - (end - position) :])
        return rest

    def clear(self) -> None:
        """Lets go of everything: the session has ended."""
        self._kept.clear()


class Incoming:
    """How much one side has received, over all connections, and how much of it it has told."""

    __slots__ = ("_told", "position")

    def __init__(self) -> None:
        self.position = 0
        """How many bytes have been received."""
        self._told = 0

    def received(self, size_bytes: int) -> bool:
        """Notes received bytes; returns whether they are to be acknowledged now."""
        self.position += size_bytes
        return self.position - self._told >= ACKNOWLEDGE_BYTES

    def acknowledgement(self) -> int | None:
        """Returns the position to acknowledge, as told from now on; None if there is no need."""
        if self.position - self._told <= LEAST_BYTES:
            return None
        self._told = self.position
        return self._told
