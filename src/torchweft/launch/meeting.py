"""Where the workers of a run meet, and what their environment says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torchweft.launch.port import ReservedPort
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
