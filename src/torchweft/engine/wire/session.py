"""Sessions: a stream of bytes between two workers that outlives its connections.

Each side counts the bytes of both directions. The count is the *position*: it numbers every byte,
and with it every frame. The sender keeps all unacknowledged bytes for retransmission. After a break
each side tells the position that it has received, and the peer resumes from there, even in the
middle of a frame. So data arrives exactly once and in order, or the session ends.

The sender keeps the buffers themselves, without a copy. See ``docs/protocols/sessions.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torchweft.engine.wire.frames import Buffer
from torchweft.errors import ProtocolError

ACKNOWLEDGE_BYTES = 1 << 16
"""How much may be received before the next message to the sender begins with an acknowledgement."""
ALONE_BYTES = 1 << 20
"""How much may be received before an acknowledgement is sent by itself. Smaller amounts wait for a
message, as the answer to a call would be, or for a while."""
LEAST_BYTES = 24
"""Data of at most this size is not acknowledged: it may be a pure acknowledgement, and two idle
peers would acknowledge each other for ever."""


class Outgoing:
    """The retransmission buffer: the sent data that may have to be sent again.

    One thread at a time may ``keep``, and one may ``acknowledge`` concurrently; no other method may
    run during ``since``.
    """

    __slots__ = ("_kept", "acknowledged", "position")

    def __init__(self) -> None:
        self.position = 0
        """How many bytes were ever passed to ``keep``."""
        self.acknowledged = 0
        """How many of them the receiver has acknowledged."""
        # Each buffer with the position of its end.
        self._kept: deque[tuple[int, Buffer]] = deque()

    @property
    def kept_bytes(self) -> int:
        """How many bytes are unacknowledged."""
        return self.position - self.acknowledged

    def keep(self, parts: Sequence[Buffer]) -> None:
        """Keeps buffers, which follow all earlier ones, until they are acknowledged."""
        position = self.position
        for part in parts:
            position += len(part)
            self._kept.append((position, part))
        self.position = position

    def acknowledge(self, position: int) -> None:
        """Releases the buffers that end at or before ``position``.

        Raises:
            ProtocolError: ``position`` is beyond the sent bytes.
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
        """Returns the data to send, perhaps again, from ``position`` on.

        Raises:
            ProtocolError: The data is no longer kept, or was never sent.
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
        """Releases all buffers, because the session has ended."""
        self._kept.clear()


class Incoming:
    """How much one side has received over all connections, and how much it has acknowledged.

    Args:
        alone_bytes: How much may be received before an acknowledgement is sent by itself.
    """

    __slots__ = ("_alone_bytes", "_told", "position")

    def __init__(self, alone_bytes: int = ALONE_BYTES) -> None:
        self.position = 0
        """How many bytes have been received; counted by the owner."""
        self._alone_bytes = alone_bytes
        self._told = 0

    @property
    def is_due(self) -> bool:
        """Whether the next message is to begin with an acknowledgement."""
        return self.position - self._told >= ACKNOWLEDGE_BYTES

    @property
    def is_much(self) -> bool:
        """Whether to send an acknowledgement by itself."""
        return self.position - self._told >= self._alone_bytes

    def acknowledgement(self) -> int | None:
        """Returns the position to acknowledge, and notes it as told; None if there is no need."""
        if self.position - self._told <= LEAST_BYTES:
            return None
        return self.repetition()

    def repetition(self) -> int:
        """Returns the position to acknowledge even if it was told before; notes it as told."""
        self._told = self.position
        return self._told
