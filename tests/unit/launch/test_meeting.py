from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from torchweft.errors import ConfigurationError
from torchweft.launch.meeting import PortMeeting, ReservedPort, StoreMeeting, StoreServer

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


def test_an_open_group_meets_at_the_launcher() -> None:
    meeting = StoreMeeting()
    there = {"HOME": "/home/me", "WEFT_INIT_METHOD": meeting.server.init_method}
    assert meeting.environment(OUTSIDE) == there
    meeting.renew()
    assert meeting.environment(OUTSIDE) == there
    meeting.close()


def test_a_store_that_the_user_named_is_left_to_him() -> None:
    meeting = StoreMeeting()
    outside = {**OUTSIDE, "WEFT_INIT_METHOD": "tcp://elsewhere:4000"}
    assert meeting.environment(outside)["WEFT_INIT_METHOD"] == "tcp://elsewhere:4000"
    meeting.close()


def listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_worker_can_listen_on_the_reserved_port(host: str) -> None:
    with (
        closing(ReservedPort()) as port,
        listen(host, port.number) as listener,
        socket.create_connection(("127.0.0.1", port.number)) as client,
    ):
        accepted, _ = listener.accept()
        accepted.close()
        assert client.recv(1) == b""


def test_nobody_else_is_given_the_reserved_port() -> None:
    with closing(ReservedPort()) as port:
        others = [ReservedPort() for _ in range(200)]
        numbers = {other.number for other in others}
        for other in others:
            other.close()
    assert port.number not in numbers
    assert len(numbers) == 200


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as listener:
        number = listener.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {number} cannot be used"):
            ReservedPort(number)


# The store in the launcher


Ask = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer()
    yield made
    made.close()


@pytest.fixture
def asking(server: StoreServer) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.settimeout(5)
        made.bind("")
        made.connect("\0" + server.init_method.removeprefix("unix://"))
        yield made


@pytest.fixture
def ask(server: StoreServer, asking: socket.socket) -> Ask:
    def ask_once(*request: object) -> Any:
        asking.send(json.dumps(request).encode())
        server.serve()
        return json.loads(asking.recv(1 << 16))

    return ask_once


def test_keys_are_set_read_and_counted(ask: Ask) -> None:
    assert ask("check", ["a"]) == {"value": False}
    ask("set", "a", "1")
    assert ask("get", "a") == {"value": "1"}
    assert ask("add", "a", 2) == {"value": 3}
    assert ask("add", "b", 5) == {"value": 5}
    assert ask("get", "b") == {"value": "5"}
    assert ask("check", ["a", "b"]) == {"value": True}
    assert ask("check", ["a", "c"]) == {"value": False}


def test_a_key_is_replaced_by_who_knows_it_only(ask: Ask) -> None:
    assert ask("compare_set", "a", "expected", "first") == {"value": "expected"}
    assert ask("check", ["a"]) == {"value": False}
    assert ask("compare_set", "a", "", "first") == {"value": "first"}
    assert ask("compare_set", "a", "", "second") == {"value": "first"}
    assert ask("compare_set", "a", "first", "second") == {"value": "second"}
    assert ask("get", "a") == {"value": "second"}


@pytest.mark.parametrize(
    "request_bytes", [b"", b"\xff\xfe", b"[]", b'["drop", "a"]', b'["get", "missing"]', b'["add"]']
)
def test_nonsense_gets_an_answer_that_says_so(
    request_bytes: bytes, server: StoreServer, asking: socket.socket, ask: Ask
) -> None:
    asking.send(request_bytes)
    server.serve()
    assert "problem" in json.loads(asking.recv(1 << 16))
    assert ask("add", "works", 1) == {"value": 1}


def test_who_asks_and_dies_is_forgotten(server: StoreServer, ask: Ask) -> None:
    name = "\0" + server.init_method.removeprefix("unix://")
    for has_name in (True, False):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dying:
            if has_name:
                dying.bind("")
            dying.connect(name)
            dying.send(b'["add", "works", 1]')
    assert ask("get", "works") == {"value": "1"}  # requests without an address are ignored


def test_strangers_are_not_answered(
    server: StoreServer, asking: socket.socket, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    asking.send(b'["add", "secret", 1]')
    server.serve()
    asking.setblocking(False)
    with pytest.raises(BlockingIOError):
        asking.recv(1 << 16)
    monkeypatch.undo()
    asking.settimeout(5)
    assert ask("check", ["secret"]) == {"value": False}


def test_the_names_of_two_servers_differ(server: StoreServer) -> None:
    other = StoreServer()
    other.close()
    assert other.init_method != server.init_method
