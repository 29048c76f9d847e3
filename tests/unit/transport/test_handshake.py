from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ProtocolError
from weft.transport.handshake import (
    VERSION,
    Greeting,
    decode_greeting,
    receive_greeting,
    send_greeting,
)
from weft.wire.frames import HEADER
from weft.wire.messages import Kind

TOKEN = "0123456789abcdef"
GREETING = Greeting(3, TOKEN, facts={"cma": [1, "two"], "empty": None})

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def receive(connection: socket.socket, timeout_s: float = 5.0) -> Greeting:
    return receive_greeting(connection, Kind.HELLO, TOKEN, timeout_s)


def test_a_greeting_survives(pair: Pair) -> None:
    send_greeting(pair[0], Kind.HELLO, GREETING)
    assert receive(pair[1]) == GREETING


def test_not_a_byte_past_the_greeting_is_read(pair: Pair) -> None:
    send_greeting(pair[0], Kind.HELLO, GREETING)
    pair[0].sendall(b"next frame")
    receive(pair[1])
    assert pair[1].recv(100) == b"next frame"


def changed(**fields: Any) -> bytes:
    return json.dumps({**asdict(GREETING), **fields}).encode()


def test_another_run_is_refused() -> None:
    for token in ("", TOKEN[:-1], TOKEN + "x", "é", "\ud800"):
        with pytest.raises(ProtocolError):
            decode_greeting(changed(token=token), TOKEN)


def test_another_version_is_refused_and_told_what_to_do() -> None:
    with pytest.raises(ProtocolError, match="install the same Weft"):
        decode_greeting(changed(version=VERSION + 1), TOKEN)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"\xff",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        changed(more=1),
        changed(worker="3"),
        changed(worker=True),
        changed(worker=1.5),
        changed(token=None),
        changed(token=["x"]),
        changed(facts=[]),
        b'{"worker": 1, "token": "\\ud800"}',
    ],
    ids=lambda data: data[:20].decode(errors="replace"),
)
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_greeting(data, TOKEN)


values = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.none())


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from(["worker", "token", "refusal", "facts", "version"]), values)
    | st.binary(max_size=30)
)
def test_a_stranger_is_always_refused(said: dict[str, Any] | bytes) -> None:
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    with pytest.raises(ProtocolError):
        decode_greeting(data, TOKEN)


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(Kind.CALL, 0, 0, 10, 0),
        HEADER.pack(Kind.HELLO, 0, 1, 10, 0),
        HEADER.pack(Kind.HELLO, 0, 0, (1 << 20) + 1, 0),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_another_protocol_is_refused_by_its_first_bytes(pair: Pair, header: bytes) -> None:
    pair[0].sendall(header)
    with pytest.raises(ProtocolError, match="does not speak"):
        receive(pair[1])


def test_the_end_of_the_connection_is_noticed(pair: Pair) -> None:
    pair[0].sendall(HEADER.pack(Kind.HELLO, 0, 0, 10, 0) + b"half")
    pair[0].close()
    with pytest.raises(ConnectionError, match="end of file"):
        receive(pair[1])


def test_silence_ends_in_time(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        receive(pair[1], timeout_s=0.01)


def test_time_that_is_up_already_is_up(pair: Pair) -> None:
    send_greeting(pair[0], Kind.HELLO, GREETING)
    with pytest.raises(TimeoutError):
        receive(pair[1], timeout_s=0.0)
