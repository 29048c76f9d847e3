"""The launcher's rendezvous store, in which the workers of an open group meet.

The loop that follows the workers serves the store, which needs neither torch nor a thread. The
store lives as long as the run, whichever worker dies. Nothing listens on the network. Every user
of the machine can see the socket's name, so the server checks each sender: the kernel attaches the
sending user to each datagram. See ``torchweft.agent.launcher_store`` for the workers' side.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any

_REQUEST_BYTES = 1 << 18
_AT_ONCE = 64
"""Requests answered before the loop looks after the workers again."""

# Errors of malformed requests: nested too deeply, or with an infinite number.
_NONSENSE = (ValueError, TypeError, KeyError, RecursionError, OverflowError)

_CREDENTIALS = struct.Struct("3i")  # process, user and group, as Linux has them


class StoreServer:
    """Keeps keys and values, and answers requests from workers of this user.

    Attributes:
        init_method: The address by which workers find the store.
    """

    def __init__(self) -> None:
        name = f"weft-meeting-{secrets.token_hex(16)}"
        self.init_method = f"unix://{name}"
        self._values: dict[str, str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{name}")
        self._operations: dict[str, Callable[..., object]] = {
            "set": self._values.__setitem__,
            "get": self._values.__getitem__,
            "add": self._add,
            "compare_set": self._compare_set,
            "check": lambda keys: all(key in self._values for key in keys),
        }

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a request has arrived."""
        return self._socket.fileno()

    def serve(self) -> None:
        """Answers pending requests; does not block."""
        for _ in range(_AT_ONCE):
            try:
                request, control, _, sender = self._socket.recvmsg(
                    _REQUEST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            if sender and _is_of_this_user(control):
                with contextlib.suppress(OSError):  # the worker died meanwhile, or does not listen
                    self._socket.sendto(self._answer(request), sender)

    def close(self) -> None:
        """Closes the socket; the keys are lost."""
        self._socket.close()

    def _answer(self, request: bytes) -> bytes:
        try:
            operation, *arguments = json.loads(request)
            answer: dict[str, object] = {"value": self._operations[operation](*arguments)}
        except _NONSENSE as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        return json.dumps(answer).encode()

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        """Behaves like PyTorch's stores: a missing key equals the empty string."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = desired
            return desired
        return expected if current is None else current


def _is_of_this_user(control: list[tuple[int, int, Any]]) -> bool:
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, user, _ = _CREDENTIALS.unpack(data)
            return bool(user == os.geteuid())
    return False
