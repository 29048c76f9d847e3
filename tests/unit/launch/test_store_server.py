from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchweft.launch.store_server import StoreServer

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
