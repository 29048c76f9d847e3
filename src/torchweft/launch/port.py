"""Finds a port for the workers to meet at, and keeps other programs from taking it first.

Asking the kernel for a free port and closing the socket again leaves a gap of seconds, until
the first worker has started and listens, in which anybody may get the same port. So the socket
stays bound, but does not listen, for as long as the run lasts. As both it and the worker's
socket allow the address to be reused, and only one of them listens, Linux lets the worker
listen on the port; yet it gives the port to nobody who asks for just any free one.
"""

from __future__ import annotations

import socket
from types import TracebackType

from torchweft.errors import ConfigurationError


class ReservedPort:
    """Holds a free port of the loopback interface within a ``with`` block.

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

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the port; harmless when repeated."""
        self._socket.close()
