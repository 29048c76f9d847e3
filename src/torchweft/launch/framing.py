"""Frames between a launcher and the agent of another host, over the pipes of ``ssh`` or ``srun``.

A frame is a JSON object after its length. Shells and remote set-ups may print text before the agent
begins, so the agent first writes a line that nothing else writes, and its frames follow.
"""

from __future__ import annotations

import json
import os
import struct

from torchweft.errors import ProtocolError
from torchweft.launch.control import Message

MARK = b"torchweft host agent 1\n"
ALIVE_S = 5.0
"""Seconds between the frames by which launcher and agent show that they are there."""
SILENCE_S = 30.0
"""Seconds without a frame after which the other side is gone, although nothing said so."""

READ_BYTES = 1 << 16
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 26


def pack(message: Message) -> bytes:
    """Returns the frame of a message."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of ``data``; blocks until it is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Unpacker:
    """Puts pieces of a stream of frames together."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Takes the next piece and returns the messages that are now complete.

        Raises:
            ProtocolError: The stream has no frames.
        """
        self._received += data
        messages: list[Message] = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _MOST_BYTES:
                raise ProtocolError("the other end of a host's connection sends no frames")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages
