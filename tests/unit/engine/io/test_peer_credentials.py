from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.another_user import NOBODY, as_nobody
from torchweft.engine.io import handshake
from torchweft.engine.io.handshake import check_user, user_of
from torchweft.errors import ProtocolError

KINDS = ["unix", "127.0.0.1", "127.8.8.8", "::1"]


def listen(kind: str) -> socket.socket:
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen()
        return listener
    family = socket.AF_INET6 if ":" in kind else socket.AF_INET
    try:
        return socket.create_server((kind, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {kind}")


def dial(listener: socket.socket) -> socket.socket:
    connection = socket.socket(listener.family)
    connection.connect(listener.getsockname())
    return connection


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    with listen(request.param) as listener, dial(listener) as dialled:
        accepted, _ = listener.accept()
        with accepted:
            yield dialled, accepted


def test_the_other_end_is_of_this_user(pair: tuple[socket.socket, socket.socket]) -> None:
    for connection in pair:
        assert user_of(connection) == os.geteuid()
        check_user(connection)


@pytest.mark.parametrize("kind", KINDS)
def test_another_user_that_dials(kind: str) -> None:
    with listen(kind) as listener:
        with as_nobody():
            dialled = dial(listener)
        accepted, _ = listener.accept()
        with dialled, accepted:
            assert user_of(accepted) == NOBODY
            with pytest.raises(ProtocolError, match=f"user {NOBODY} is at the other end"):
                check_user(accepted)
            check_user(dialled)


@pytest.mark.parametrize("kind", KINDS)
def test_another_user_that_listens(kind: str) -> None:
    with as_nobody():
        listener = listen(kind)
    with listener, dial(listener) as dialled:
        with as_nobody():
            accepted, _ = listener.accept()
        with accepted:
            assert user_of(dialled) == NOBODY
            with pytest.raises(ProtocolError, match=f"user {NOBODY} is at the other end"):
                check_user(dialled)


def test_root_may_be_at_the_other_end(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "user_of", lambda connection: 0)
    check_user(pair[0])


def test_a_connection_that_nobody_has_accepted_is_of_nobody() -> None:
    with listen("127.0.0.1") as listener, dial(listener) as dialled:
        assert user_of(dialled) is None
        with pytest.raises(ConnectionError, match="it must be known which user"):
            check_user(dialled)


def test_without_tables_no_user_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(handshake, "_TABLES", (str(tmp_path / "none"),))
    with listen("127.0.0.1") as listener, dial(listener) as dialled:
        accepted, _ = listener.accept()
        with accepted:
            assert user_of(dialled) is None
