from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from torchweft.errors import ConfigurationError
from torchweft.launch.run import FileMeeting, PortMeeting

OUTSIDE = {"HOME": "/home/me", "WORLD_SIZE": "77", "MASTER_ADDR": "far", "MASTER_PORT": "1"}


def test_a_group_of_known_size_meets_at_a_port_of_its_own_each_time() -> None:
    meeting = PortMeeting(3)
    first = meeting.environment(OUTSIDE)
    assert first["MASTER_PORT"].isdigit()
    assert {**first, "MASTER_PORT": "?"} == {
        "HOME": "/home/me",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "?",
    }
    meeting.renew()
    assert meeting.environment(OUTSIDE)["MASTER_PORT"] != first["MASTER_PORT"]
    meeting.close()


def test_a_port_that_was_asked_for_stays() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} cannot be used"):
            PortMeeting(2, port)
    meeting = PortMeeting(2, port)
    meeting.renew()
    assert meeting.environment({})["MASTER_PORT"] == str(port)
    meeting.close()


def test_an_open_group_meets_at_a_file_of_the_launcher(tmp_path: Path) -> None:
    meeting = FileMeeting(str(tmp_path))
    there = {"HOME": "/home/me", "WEFT_INIT_METHOD": f"file://{tmp_path}/group"}
    assert meeting.environment(OUTSIDE) == there
    meeting.renew()
    assert meeting.environment(OUTSIDE) == there
    meeting.close()


def test_a_store_that_the_user_named_is_left_to_him(tmp_path: Path) -> None:
    meeting = FileMeeting(str(tmp_path))
    outside = {**OUTSIDE, "WEFT_INIT_METHOD": "tcp://elsewhere:4000"}
    assert meeting.environment(outside)["WEFT_INIT_METHOD"] == "tcp://elsewhere:4000"
    meeting.close()


def port_of(meeting: PortMeeting) -> int:
    return int(meeting.environment({})["MASTER_PORT"])


def listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_worker_can_listen_on_the_reserved_port(host: str) -> None:
    with (
        closing(PortMeeting(1)) as meeting,
        listen(host, port_of(meeting)) as listener,
        socket.create_connection(("127.0.0.1", port_of(meeting))) as client,
    ):
        accepted, _ = listener.accept()
        accepted.close()
        assert client.recv(1) == b""


def test_nobody_else_is_given_the_reserved_port() -> None:
    with closing(PortMeeting(1)) as meeting:
        others = [PortMeeting(1) for _ in range(200)]
        numbers = {port_of(other) for other in others}
        for other in others:
            other.close()
        assert port_of(meeting) not in numbers
    assert len(numbers) == 200


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as listener:
        number = listener.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {number} cannot be used"):
            PortMeeting(1, number)
