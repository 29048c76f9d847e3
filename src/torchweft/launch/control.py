"""Carries messages and file descriptors between a launcher and its nursery.

A message is a JSON object, preceded by its length. Descriptors travel beside the bytes of their
message. Both arrive in the order sent, so the receiver takes the next descriptors when it handles
that message.
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

Message = dict[str, Any]

Ladder = Sequence[tuple[int, float]]
"""Signals to send one after the other, each with the seconds to wait before the next."""

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 16
_DESCRIPTORS_AT_ONCE = 64


class ControlSocket:
    """One end of the connection; several threads may send, one thread may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
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
        body = json.dumps(message).encode()
        data = _LENGTH.pack(len(body)) + body
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
                self._connection, _READ_BYTES, _DESCRIPTORS_AT_ONCE
            )
        except ConnectionResetError:
            data, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not data:
            raise EOFError("the other end of the control connection is closed")
        self._received += data
        return self._complete_messages()

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

    def _complete_messages(self) -> list[Message]:
        messages = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages
