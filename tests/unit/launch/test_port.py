from __future__ import annotations

import socket

import pytest

from torchweft.errors import ConfigurationError
from torchweft.launch.port import ReservedPort


def listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_worker_can_listen_on_the_reserved_port(host: str) -> None:
    with (
        ReservedPort() as port,
        listen(host, port.number) as listener,
        socket.create_connection(("127.0.0.1", port.number)) as client,
    ):
        accepted, _ = listener.accept()
        accepted.close()
        assert client.recv(1) == b""


def test_nobody_else_is_given_the_reserved_port() -> None:
    with ReservedPort() as port:
        others = [ReservedPort() for _ in range(200)]
        numbers = {other.number for other in others}
        for other in others:
            with other:
                pass
    assert port.number not in numbers
    assert len(numbers) == 200


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as listener:
        number = listener.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {number} cannot be used"):
            ReservedPort(number)
