"""Messages that wait for the first connection to their receiver, in the order of sending."""

from __future__ import annotations

from collections import deque

from torchweft.wire.frames import Buffer, Frame

Outgoing = list[Buffer] | Frame
"""A message to send: bytes to write or, from a worker to itself, a frame as it is received."""


class Unsent:
    """A message that waits for the first connection to its receiver.

    Args:
        message: The message to send.
    """

    def __init__(self, message: Outgoing) -> None:
        self._message = message

    def make(self) -> Outgoing:
        """Returns the message to send; an exception raised here is passed to ``drop``."""
        return self._message

    def is_wanted(self) -> bool:
        """Whether the message is still to be sent."""
        return True

    def drop(self, error: Exception | None) -> None:
        """Called if the message will not be sent; ``error`` is None if it is not wanted."""


class UnsentMessages(deque[Unsent]):
    """The messages that wait for one receiver. Not thread-safe, but any thread may read ``len``.

    The first message is removed only after it has been written: later messages must not overtake
    it. So a message is kept as long as an earlier one is, even once there is a connection.
    """

    def keep(self, unsent: Unsent, *, is_linked: bool) -> bool:
        """Keeps a message, unless there is a connection and no earlier message waits.

        Returns:
            Whether the message is kept; if not, it may be sent at once.
        """
        if is_linked and not self:
            return False
        self.append(unsent)
        return True

    def take_unwanted(self) -> list[Unsent]:
        """Removes and returns the messages that are no longer wanted."""
        unwanted = [unsent for unsent in self if not unsent.is_wanted()]
        for unsent in unwanted:
            self.remove(unsent)
        return unwanted

    def take_all(self) -> list[Unsent]:
        """Removes and returns all messages: there will be no connection."""
        taken = list(self)
        self.clear()
        return taken
