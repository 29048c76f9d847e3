from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest

from torchweft.launch.run import PortMeeting
from torchweft.launch.worker import HeldPort

OUTSIDE = {"HOME": "/home/me", "WORLD_SIZE": "77", "MASTER_ADDR": "far", "MASTER_PORT": "1"}


def test_a_group_of_known_size_meets_at_another_port_each_time_unless_one_was_given() -> None:
    ports = iter((8, 9))
    meeting = PortMeeting(3, 7, lambda: "here", lambda: next(ports))
    there = {"HOME": "/home/me", "WORLD_SIZE": "3", "MASTER_ADDR": "here", "MASTER_PORT": "7"}
    assert meeting.environment(OUTSIDE) == there
    meeting.renew()
    assert meeting.environment(OUTSIDE) == there | {"MASTER_PORT": "8"}
    given = PortMeeting(3, 7)
    given.renew()
    assert given.environment({})["MASTER_PORT"] == "7"


def listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_worker_can_listen_on_the_held_port(host: str) -> None:
    with closing(HeldPort("127.0.0.1")) as held:
        port = held.take()
        with (
            listen(host, port) as listener,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""


def test_nobody_else_is_given_the_held_port() -> None:
    with closing(HeldPort("127.0.0.1")) as held, ExitStack() as others:
        port = held.take()
        numbers = {others.enter_context(closing(HeldPort("127.0.0.1"))).take() for _ in range(200)}
        assert port not in numbers
        assert len(numbers) == 200
        assert held.take() not in {port, *numbers}
