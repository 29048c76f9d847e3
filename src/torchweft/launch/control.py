"""Messages between a launcher, its nursery, and the agents of other hosts.

A message is a JSON object, preceded by its length. Over a socket, descriptors travel beside the
bytes of their message. Both arrive in the order sent, so the receiver takes the next descriptors
when it handles that message.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from torchweft.errors import ProtocolError

Message = dict[str, Any]

Ladder = Sequence[tuple[int, float]]
"""Signals to send one after the other, each with the seconds to wait before the next."""

READ_BYTES = 1 << 16
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 28
"""Text in place of a length would be more: each byte of it is a space or above."""
_DESCRIPTORS_AT_ONCE = 64


def pack(message: Message) -> bytes:
    """Returns a message as bytes."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Puts pieces of a stream of messages together."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Takes the next piece and returns the messages that are now complete.

        Raises:
            ProtocolError: The stream has no messages.
        """
        self._received += data
        messages: list[Message] = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _MOST_BYTES:
                raise ProtocolError("the other end of a launcher's connection sends no messages")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages


class ControlSocket:
    """One end of the connection; several threads may send, one thread may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unpacker = Unpacker()
        self._descriptors: deque[int] = deque()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Returns the descriptor to wait on for messages."""
        return self._connection.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends one message, and copies of ``descriptors``; blocks until all of it is written.

        Raises:
            ConnectionError: The other process is gone.
        """
        data = pack(message)
        with self._sending:
            sent = 0
            if descriptors:
                sent = socket.send_fds(self._connection, [data], list(descriptors))
            self._connection.sendall(data[sent:])

    def receive(self) -> list[Message]:
        """Reads once, which may block, and returns the messages that are now complete.

        Raises:
            EOFError: The other process is gone.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, READ_BYTES, _DESCRIPTORS_AT_ONCE
            )
        except ConnectionResetError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            raise EOFError("the other end of the control connection is closed")
        return self._unpacker.feed(data)

    def take_descriptors(self, count: int) -> list[int]:
        """Returns the descriptors of the current message; the caller owns and closes them."""
        return [self._descriptors.popleft() for _ in range(count)]

    def finish_sending(self) -> None:
        """Closes the sending direction; the other process's messages can still be received."""
        with contextlib.suppress(OSError):  # closed, or the other process is gone
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection and the descriptors that were not taken."""
        self._connection.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
