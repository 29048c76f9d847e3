"""Where the workers of a run meet, and what their environment says of it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol

from torchweft.errors import ConfigurationError
from torchweft.launch.store_server import StoreServer

INIT_METHOD_VARIABLE = "WEFT_INIT_METHOD"

_OF_CLOSED_GROUPS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Meeting(Protocol):
    """A place at which workers find each other."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` as workers that meet here have it."""

    def renew(self) -> None:
        """Makes it a place at which nobody has been yet."""

    def close(self) -> None:
        """Gives it up."""


class ReservedPort:
    """Holds a free port of the loopback interface, so that no other program takes it.

    A free port that is asked of the kernel, and given back, can be anybody's until the first worker
    has started and listens, seconds later. So the socket stays bound, but does not listen. As it
    and the worker's socket allow the address to be reused, and only one of them listens, Linux lets
    the worker listen on the port; but the kernel gives it to no program that asks for a free one.

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
        """Lets go of the port; harmless when repeated."""
        self._socket.close()


class PortMeeting:
    """A port at which the worker with rank 0 keeps the store: for a group of known size.

    Args:
        world_size: Workers of the group.
        number: The port; 0 for a free one.

    Raises:
        ConfigurationError: Another program listens on that port.
    """

    def __init__(self, world_size: int, number: int = 0) -> None:
        self._world_size = world_size
        self._is_chosen = number != 0
        self._port = ReservedPort(number)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` with the variables that ``env://`` looks at."""
        return {
            **base,
            "WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.number),
        }

    def renew(self) -> None:
        """Takes another port, unless it was told one: what is left of a group may hold on to it."""
        if not self._is_chosen:
            former, self._port = self._port, ReservedPort()
            former.close()

    def close(self) -> None:
        """Lets go of the port."""
        self._port.close()


class StoreMeeting:
    """A store that this process keeps: for an open group, which has no size.

    Attributes:
        server: The store, to be served in the loop of the run.
    """

    def __init__(self) -> None:
        self.server = StoreServer()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` without a size and a port, but with the way to the store.

        A store that the user has named is left to him: it may join workers of several machines.
        """
        environment = {key: value for key, value in base.items() if key not in _OF_CLOSED_GROUPS}
        environment.setdefault(INIT_METHOD_VARIABLE, self.server.init_method)
        return environment

    def renew(self) -> None:
        """Does nothing: who comes back finds those who stayed."""

    def close(self) -> None:
        """Closes the store."""
        self.server.close()
