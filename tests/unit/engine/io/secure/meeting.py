"""Two ends of a TCP connection, and the outcomes when both act at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

from torchweft.engine.io.secure import SecureConnection, TlsOptions, secure_client, secure_server

LIMIT_S = 20.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the client's and the server's socket of a new connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def outcome(future: Future[object]) -> object:
    """Returns the result, or the exception."""
    error = future.exception(LIMIT_S)
    return future.result() if error is None else error


def meet(
    as_client: Callable[[socket.socket], object], as_server: Callable[[socket.socket], object]
) -> tuple[object, object]:
    """Runs both sides at once; closes a side's socket when that side is done or has failed.

    Returns:
        Result or exception of the client, and of the server.
    """

    def run(side: Callable[[socket.socket], object], connection: socket.socket) -> object:
        with connection:
            result = side(connection)
            if isinstance(result, SecureConnection):
                result.close()
            return result

    client, server = tcp_pair()
    with ThreadPoolExecutor(2) as pool:
        futures = pool.submit(run, as_client, client), pool.submit(run, as_server, server)
        return outcome(futures[0]), outcome(futures[1])


@contextlib.contextmanager
def secure_pair(
    client_options: TlsOptions, server_options: TlsOptions
) -> Iterator[tuple[SecureConnection, SecureConnection]]:
    """Yields the client's and the server's end of a new secure connection."""
    client, server = tcp_pair()
    with client, server, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(secure_server, server, server_options, LIMIT_S)
        first = secure_client(client, client_options, LIMIT_S)
        second = accepting.result(LIMIT_S)
        with first, second:
            yield cast(SecureConnection, first), cast(SecureConnection, second)
