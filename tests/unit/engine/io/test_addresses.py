from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import cases
from tests.thorough import examples
from torchweft.engine.io.addresses import (
    Address,
    TcpAddress,
    UnixAddress,
    dial,
    listen_tcp,
    parse,
    tune,
)
from torchweft.errors import ConfigurationError

LIMIT_S = 20.0


@pytest.mark.parametrize(
    "address",
    [
        UnixAddress("weft-1"),
        TcpAddress("127.0.0.1", 4000),
        TcpAddress("::1", 1),
        TcpAddress("h", 0),
        TcpAddress("127.0.0.1", 4000, is_secure=True),
    ],
    ids=str,
)
def test_an_address_survives_as_text(address: Address) -> None:
    assert parse(str(address)) == address


@cases(
    "text",
    [
        "",
        "unix:x",
        "tls:",
        "TLS:host:1",
        "tls:host",
        "tcp:",
        "tcp:host",
        "tcp::1",
        "tcp:host:",
        "tcp:host:²",
        "tcp:host:65536",
        "x",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match="looks like tcp:127"):
        parse(text)


@settings(max_examples=examples(50))
@given(st.text(max_size=20) | st.text(max_size=9).map(lambda text: f"tcp:{text}:{text}"))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse(text)
    except ConfigurationError:
        return
    assert parse(str(address)) == address


def check_listener(listener: socket.socket, address: Address) -> None:
    with listener, dial(address, 5.0) as caller:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"hello")
            assert caller.recv(5) == b"hello"


def test_an_address_of_another_machine_is_explained() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1.*leave the option out"):
        listen_tcp("192.0.2.1")


def test_connections_within_one_machine_are_not_paced() -> None:
    listener, address = listen_tcp("127.0.0.1")
    with listener, dial(address, LIMIT_S) as ours:
        theirs, _ = listener.accept()
        with theirs:
            tune(theirs)
            for end in (ours, theirs):
                chosen = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert chosen.rstrip(b"\0") == b"reno"
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
