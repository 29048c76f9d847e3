from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.io import handshake as module
from torchweft.engine.io.handshake import (
    LIMIT_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    VERSION,
    Greeting,
    Handshake,
    NotProven,
)
from torchweft.engine.wire.frames import HEADER, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError
from torchweft.secret import Secret

LIMIT_S = 20.0
KEY = Secret(b"the key of this run")
OTHER_KEY = Secret(b"the key of another run")
HELLO = Greeting(3, facts={"cma": [1, "two"], "empty": None})
WELCOME = Greeting(4, "full up", facts={"x": 1})

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def begin(
    pair: Pair, dialler_key: Secret = KEY, acceptor_key: Secret = KEY, limit_s: float = LIMIT_S
) -> tuple[Handshake, Handshake]:
    """Returns the dialler's end and the acceptor's."""
    deadline_s = time.monotonic() + limit_s
    acceptor = Handshake.accept(pair[1], acceptor_key, deadline_s)
    return Handshake.dial(pair[0], dialler_key, deadline_s), acceptor


def test_both_sides_learn_who_the_other_is(pair: Pair) -> None:
    dialler, acceptor = begin(pair)
    dialler.send(Kind.HELLO, HELLO)
    assert acceptor.receive(Kind.HELLO) == HELLO
    acceptor.send(Kind.WELCOME, WELCOME)
    assert dialler.receive(Kind.WELCOME) == WELCOME
    dialler.send(Kind.VERDICT, HELLO)
    assert acceptor.receive(Kind.VERDICT) == HELLO


def test_not_a_byte_past_a_greeting_is_read(pair: Pair) -> None:
    dialler, acceptor = begin(pair)
    dialler.send(Kind.HELLO, HELLO)
    pair[0].sendall(b"next frame")
    acceptor.receive(Kind.HELLO)
    assert pair[1].recv(100) == b"next frame"
    acceptor.send(Kind.WELCOME, WELCOME)
    pair[1].sendall(b"another one")
    dialler.receive(Kind.WELCOME)
    assert pair[0].recv(100) == b"another one"


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_a_descriptor_goes_only_over_unix_sockets(family: str) -> None:
    if family == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
    with ours, theirs, open("/dev/null") as file:
        dialler, acceptor = begin((ours, theirs))
        descriptors: list[int] = []
        dialler.send(Kind.HELLO, HELLO, [file.fileno()] if family == "unix" else [])
        assert acceptor.receive(Kind.HELLO, descriptors) == HELLO
        assert len(descriptors) == (family == "unix")
        for descriptor in descriptors:
            assert not os.get_inheritable(descriptor)
            assert os.fstat(descriptor).st_rdev == os.fstat(file.fileno()).st_rdev
            os.close(descriptor)


# Strangers


def test_a_dialler_with_another_key_is_not_proven_and_told_so(pair: Pair) -> None:
    dialler, acceptor = begin(pair, dialler_key=OTHER_KEY)
    dialler.send(Kind.HELLO, HELLO)
    with pytest.raises(NotProven, match="another secret"):
        acceptor.receive(Kind.HELLO)
    acceptor.refuse_proof()
    with pytest.raises(NotProven, match="does not take this worker's proof"):
        dialler.receive(Kind.WELCOME)


def test_an_acceptor_with_another_key_is_not_proven(pair: Pair) -> None:
    """A stranger has taken over the address and answers every greeting."""
    dialler, acceptor = begin(pair, acceptor_key=OTHER_KEY)
    dialler.send(Kind.HELLO, HELLO)
    with pytest.raises(NotProven):
        acceptor.receive(Kind.HELLO)
    acceptor.send(Kind.WELCOME, WELCOME)
    with pytest.raises(NotProven, match="another secret"):
        dialler.receive(Kind.WELCOME)


class Recorder:
    """A socket that keeps what is written to it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.written = b""

    def sendall(self, data: bytes) -> None:
        self.written += data
        self._connection.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def record() -> tuple[bytes, bytes]:
    """Returns the bytes that a dialler and an acceptor send in a handshake."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        dialler_end, acceptor_end = Recorder(ours), Recorder(theirs)
        dialler, acceptor = begin((dialler_end, acceptor_end))  # type: ignore[arg-type]
        dialler.send(Kind.HELLO, HELLO)
        acceptor.receive(Kind.HELLO)
        acceptor.send(Kind.WELCOME, WELCOME)
        dialler.receive(Kind.WELCOME)
        return dialler_end.written, acceptor_end.written


def test_a_recorded_hello_is_refused(pair: Pair) -> None:
    said, _ = record()
    acceptor = Handshake.accept(pair[1], KEY, time.monotonic() + LIMIT_S)
    pair[0].sendall(said)
    with pytest.raises(NotProven):
        acceptor.receive(Kind.HELLO)


def test_a_recorded_acceptor_is_refused(pair: Pair) -> None:
    """Replaying the challenge does not help either: the dialler has a nonce of its own."""
    _, said = record()
    pair[1].sendall(said)
    dialler = Handshake.dial(pair[0], KEY, time.monotonic() + LIMIT_S)
    dialler.send(Kind.HELLO, HELLO)
    with pytest.raises(NotProven):
        dialler.receive(Kind.WELCOME)


def test_what_was_said_is_not_taken_back_as_an_answer(pair: Pair) -> None:
    """Covers a reflected greeting, a repeated one and one of another kind."""
    end = Recorder(pair[0])
    dialler, acceptor = begin((end, pair[1]))  # type: ignore[arg-type]
    dialler.send(Kind.HELLO, HELLO)
    proof, text = greeting_in(end.written)
    acceptor.receive(Kind.HELLO)
    pair[1].sendall(b"".join(encode_frame(Kind.WELCOME, 0, 0, proof + text)))
    with pytest.raises(NotProven):
        dialler.receive(Kind.WELCOME)
    pair[0].sendall(end.written)
    with pytest.raises(NotProven):
        acceptor.receive(Kind.HELLO)
    dialler.send(Kind.VERDICT, HELLO)
    with pytest.raises(ProtocolError, match="does not speak"):
        acceptor.receive(Kind.HELLO)


def greeting_in(frame: bytes) -> tuple[bytes, bytes]:
    """Returns the proof in a HELLO, and its text."""
    said = frame[HEADER.size :]
    return said[:PROOF_BYTES], said[PROOF_BYTES + NONCE_BYTES :]


def test_every_bit_of_a_greeting_is_proven(pair: Pair) -> None:
    end = Recorder(pair[0])
    dialler, acceptor = begin((end, pair[1]))  # type: ignore[arg-type]
    dialler.send(Kind.HELLO, HELLO)
    acceptor.receive(Kind.HELLO)
    whole = end.written
    for place in range(HEADER.size, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        acceptor._counts = [0, 0]
        pair[0].sendall(changed)
        with pytest.raises(NotProven):
            acceptor.receive(Kind.HELLO)
    # The count was not the reason for the refusals.
    acceptor._counts = [0, 0]
    pair[0].sendall(whole)
    assert acceptor.receive(Kind.HELLO) == HELLO


def test_a_stranger_s_text_is_not_even_parsed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_decode", lambda text: pytest.fail("it was parsed"))
    _, acceptor = begin(pair)
    for said in (b"", b"x" * 10, b"\0" * 64 + b'{"worker": 1}', b"[" * LIMIT_BYTES):
        pair[0].sendall(b"".join(encode_frame(Kind.HELLO, 0, 0, said)))
        with pytest.raises(NotProven):
            acceptor.receive(Kind.HELLO)


@settings(max_examples=examples(60))
@given(st.binary(max_size=300))
def test_whatever_a_stranger_says_it_is_refused(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        acceptor = Handshake.accept(theirs, KEY, time.monotonic() + LIMIT_S)
        ours.sendall(said)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises((ProtocolError, ConnectionError)):
            acceptor.receive(Kind.HELLO)


@settings(max_examples=examples(60))
@given(st.binary(max_size=100))
def test_whatever_listens_somewhere_it_is_no_acceptor(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((ProtocolError, ConnectionError)):
            Handshake.dial(ours, KEY, time.monotonic() + LIMIT_S)


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(Kind.CALL, 0, 0, 10, 0),
        HEADER.pack(Kind.HELLO, 0, 1, 10, 0),
        HEADER.pack(Kind.HELLO, 0, 0, LIMIT_BYTES + 1, 0),
        HEADER.pack(Kind.GOODBYE, 0, 0, 1, 0),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_another_protocol_is_refused_by_its_first_bytes(pair: Pair, header: bytes) -> None:
    _, acceptor = begin(pair)
    pair[0].sendall(header)
    with pytest.raises(ProtocolError, match="does not speak"):
        acceptor.receive(Kind.HELLO)


def challenge(magic: bytes = b"weft", version: int = VERSION, size: int = NONCE_BYTES) -> bytes:
    said = magic + version.to_bytes(2, "little") + b"n" * size
    return b"".join(encode_frame(Kind.CHALLENGE, 0, 0, said))


@pytest.mark.parametrize(
    "said",
    [challenge(b"tfew"), challenge(size=0), challenge(size=31), challenge(size=33), b"x" * 70],
)
def test_another_challenge_is_none(pair: Pair, said: bytes) -> None:
    pair[1].sendall(said)
    with pytest.raises(ProtocolError, match="does not speak"):
        Handshake.dial(pair[0], KEY, time.monotonic() + LIMIT_S)


def test_another_version_is_refused_and_told_what_to_do(pair: Pair) -> None:
    pair[1].sendall(challenge(version=VERSION + 1))
    with pytest.raises(ProtocolError, match="install the same Weft"):
        Handshake.dial(pair[0], KEY, time.monotonic() + LIMIT_S)


# Members that send malformed greetings


def changed(**fields: Any) -> bytes:
    return json.dumps({**asdict(HELLO), **fields}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"\xff",
        b"[" * 50_000,
        b'{"a":' * 12_000,
        changed(more=1),
        changed(worker="3"),
        changed(worker=True),
        changed(worker=1.5),
        changed(refusal=None),
        changed(facts=[]),
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_what_makes_no_sense_is_refused(
    pair: Pair, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialler, acceptor = begin(pair)
    monkeypatch.setattr(module, "json", FixedJson(text))
    dialler.send(Kind.HELLO, HELLO)
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match="is malformed"):
        acceptor.receive(Kind.HELLO)


class FixedJson:
    """Writes the same text for every value."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def dumps(self, _: object) -> FixedJson:
        return self

    def encode(self) -> bytes:
        return self._text


# Time


def test_the_end_of_the_connection_is_noticed(pair: Pair) -> None:
    _, acceptor = begin(pair)
    pair[0].sendall(HEADER.pack(Kind.HELLO, 0, 0, 10, 0) + b"half")
    pair[0].close()
    with pytest.raises(ConnectionError, match="end of file"):
        acceptor.receive(Kind.HELLO)


def test_a_byte_now_and_then_does_not_give_more_time(pair: Pair) -> None:
    _, acceptor = begin(pair)
    acceptor._deadline_s = time.monotonic() + 0.1
    pair[0].sendall(HEADER.pack(Kind.HELLO, 0, 0, LIMIT_BYTES, 0))
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(acceptor.receive, Kind.HELLO)
        give_up_s = time.monotonic() + LIMIT_S
        while not received.done() and time.monotonic() < give_up_s:
            pair[0].sendall(b"x")
            time.sleep(0.005)
        pair[0].close()
        assert isinstance(received.exception(), TimeoutError)
