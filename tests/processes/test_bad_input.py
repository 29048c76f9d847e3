"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.processes import functions
from tests.contract.processes.test_bad_input import assert_all_work
from torchweft import rpc
from torchweft.engine.io import addresses
from torchweft.engine.wire.frames import encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.current import current
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")


def _partial_greeting() -> bytes:
    return b"".join(bytes(part) for part in encode_frame(Kind.HELLO, 0, 0, b'{"worker": 1'))[:-5]


def _greeting(**fields: Any) -> bytes:
    content = {"worker": 1, "token": "guessed", "refusal": "", "facts": {}, "version": 1, **fields}
    return b"".join(
        bytes(part) for part in encode_frame(Kind.HELLO, 0, 0, json.dumps(content).encode())
    )


def _hello(text: bytes) -> bytes:
    return b"".join(bytes(part) for part in encode_frame(Kind.HELLO, 0, 0, text))


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4,
    os.urandom(4096),
    b"\xff" * 64,
    _greeting(),
    _greeting(token="\ud800"),
    _greeting(token=5),
    _greeting(version=99),
    _greeting(worker="x"),
    _hello(b"[" * 100_000),
    _hello(b"null"),
    _hello(b'{"worker": 1}'),
    _hello(b""),
]


def listeners_of(name: str) -> list[addresses.Address]:
    return [addresses.parse(text) for text in current().find(name).registration.addresses]


def is_closed(connection: socket.socket, limit_s: float) -> bool:
    connection.settimeout(limit_s)
    try:
        while connection.recv(4096):
            pass  # A challenge, and perhaps a refusal because the greeting proved nothing.
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.fixture
def connections() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_a_stranger_is_turned_away(
    group: Cluster, content: bytes, connections: contextlib.ExitStack
) -> None:
    for address in listeners_of("worker0"):
        connection = connections.enter_context(addresses.dial(address, 1.0))
        connection.sendall(content)
        assert is_closed(connection, 2.0)
    assert_all_work()


def test_silent_strangers_hold_nobody_up(group: Cluster, connections: contextlib.ExitStack) -> None:
    for address in listeners_of("worker0") * 4:
        connections.enter_context(addresses.dial(address, 1.0))
        half = connections.enter_context(addresses.dial(address, 1.0))
        half.sendall(_partial_greeting())
    start_s = time.monotonic()
    for _ in range(20):
        assert_all_work()
    assert rpc.rpc_sync("worker0", functions.bounce, args=(10, ["worker0", "worker1"])) == 10
    assert time.monotonic() - start_s < 8.0  # Each stranger has ten seconds.
