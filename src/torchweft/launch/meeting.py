"""Defines where the workers of a run meet, and the environment variables that tell them.

Workers of a group of known size meet at a port, where the worker of rank 0 hosts the store. Workers
of an open group meet at a store in the launcher. The loop that follows the workers serves that
store, which needs neither torch nor a thread. It lives as long as the run, whichever worker dies.
Nothing listens on the network. Every user of the machine can see the socket's name, so the server
checks each sender: the kernel attaches the sending user to each datagram. See
``torchweft.engine.worker.rendezvous`` for the workers' side.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torchweft.errors import ConfigurationError

INIT_METHOD_VARIABLE = "WEFT_INIT_METHOD"

_OF_CLOSED_GROUPS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Meeting(Protocol):
    """A place at which workers find each other."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base``, changed for workers that meet here."""

    def renew(self) -> None:
        """Prepares for a new run: changes to an unused port, unless the port was given."""

    def close(self) -> None:
        """Releases the place."""


class ReservedPort:
    """Holds a free port of the loopback interface, so that no other program takes it.

    If a port from the kernel were released, any program could take it until the first worker has
    started and listens, seconds later. So the socket stays bound, but does not listen. It and the
    worker's socket allow address reuse, and only the worker's listens, so Linux lets the worker
    listen on the port. The kernel gives the port to no program that asks for a free port.

    Args:
        number: The port to hold; 0 lets the kernel choose.

    Raises:
        ConfigurationError: Another program listens on that port.
    """

    def __init__(self, number: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", number))
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(
                f"port {number} cannot be used ({error.strerror}); "
                "take another one, or leave --master-port away to have a free one chosen"
            ) from None
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Releases the port; idempotent."""
        self._socket.close()


class PortMeeting:
    """A port at which the worker with rank 0 hosts the store, for a group of known size.

    Args:
        world_size: Number of workers in the group.
        number: The port; 0 for a free one.

    Raises:
        ConfigurationError: Another program listens on that port.
    """

    def __init__(self, world_size: int, number: int = 0) -> None:
        self._world_size = world_size
        self._is_chosen = number != 0
        self._port = ReservedPort(number)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` with the variables that ``env://`` reads."""
        return {
            **base,
            "WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.number),
        }

    def renew(self) -> None:
        """Takes another port unless one was given: remnants of a group may still hold the port."""
        if not self._is_chosen:
            former, self._port = self._port, ReservedPort()
            former.close()

    def close(self) -> None:
        """Releases the port."""
        self._port.close()


class StoreMeeting:
    """A store in this process, for an open group, which has no fixed size.

    Attributes:
        server: The store, which the run's loop must serve.
    """

    def __init__(self) -> None:
        self.server = StoreServer()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` without a size and a port, but with the store's address.

        A store that the user has named is kept: it may connect workers of several machines.
        """
        environment = {key: value for key, value in base.items() if key not in _OF_CLOSED_GROUPS}
        environment.setdefault(INIT_METHOD_VARIABLE, self.server.init_method)
        return environment

    def renew(self) -> None:
        """Does nothing: restarted workers rejoin the workers that stayed."""

    def close(self) -> None:
        """Closes the store."""
        self.server.close()


# The store in the launcher

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
            "delete": lambda key: self._values.pop(key, None) is not None,
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
