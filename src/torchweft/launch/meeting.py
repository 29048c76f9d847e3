"""Defines where the workers of a run meet, and the environment variables that tell them.

Workers of a group of known size meet at a port, where the worker of rank 0 hosts the store. Workers
of an open group meet at a file in a folder of the launcher, which no other user can enter. It lives
as long as the run, whichever worker dies, and nothing listens. See ``GroupFile`` in
``torchweft.engine.worker.rendezvous``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Protocol

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


class FileMeeting:
    """A file for an open group, which has no fixed size.

    Args:
        folder: A folder that only this user can enter; the caller removes it after the run.
    """

    def __init__(self, folder: str) -> None:
        self._init_method = f"file://{os.path.join(folder, 'group')}"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns ``base`` without a size and a port, but with the file.

        A store that the user has named is kept: it may connect workers of several machines.
        """
        environment = {key: value for key, value in base.items() if key not in _OF_CLOSED_GROUPS}
        environment.setdefault(INIT_METHOD_VARIABLE, self._init_method)
        return environment

    def renew(self) -> None:
        """Does nothing: restarted workers rejoin the workers that stayed."""

    def close(self) -> None:
        """Does nothing: the file goes with its folder."""
