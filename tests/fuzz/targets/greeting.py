"""The first frames of a connection: a stranger's bytes are refused, whatever they are.

The first byte selects the sender of the rest: a stranger, to either side; a worker that has proven
to be of the run, as the text of a greeting; or the same with a greeting that was altered.
"""

from __future__ import annotations

import json
import math
import socket
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tests.fuzz.target import Target
from tests.fuzz.targets.membership import WORDS, assert_sound, registration
from tests.unit.engine.channels.home import SomePeer, make_home
from torchweft import knobs
from torchweft.engine.channels.channel import Meeting
from torchweft.engine.channels.channels import CHANNELS, read_description
from torchweft.engine.io.handshake import (
    LIMIT_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Greeting,
    Handshake,
    NotProven,
    number_in,
)
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.wire.frames import HEADER, HEADER_BYTES, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError
from torchweft.probe import Facts, read_facts
from torchweft.secret import Secret

_KEY = Secret(b"the key of the run, of no use elsewhere")
_CHALLENGE_BYTES = HEADER_BYTES + 6 + NONCE_BYTES
_HERE, _PEER = read_facts(), SomePeer()
with knobs.SHM_LIMIT_BYTES.override(0):
    _CHANNELS = [channel(make_home()) for channel in CHANNELS]
_MAY_RAISE = (ProtocolError, ConnectionError)


class _Socket:
    """A fake socket: returns its data in pieces, then the end; keeps the bytes that are sent."""

    family = socket.AF_INET

    def __init__(self, data: bytes = b"", piece_bytes: int = 1 << 20) -> None:
        self.data = data
        self.sent = b""
        self._piece_bytes = piece_bytes

    def recv(self, size_bytes: int) -> bytes:
        assert 0 < size_bytes <= LIMIT_BYTES, f"{size_bytes} bytes at once"
        piece = self.data[: min(size_bytes, self._piece_bytes)]
        self.data = self.data[len(piece) :]
        return piece

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def settimeout(self, timeout_s: float) -> None:
        assert timeout_s > 0


def _handshake(fake: _Socket, *, is_dialler: bool) -> Handshake:
    connection: Any = fake
    begin = Handshake.dial if is_dialler else Handshake.accept
    return begin(connection, _KEY, math.inf)


def _stranger_dials(stream: bytes) -> None:
    """A stranger dials a worker, and sends any bytes."""
    assert number_in(stream, _KEY, 1) is None
    fake = _Socket(stream, 1000)
    handshake = _handshake(fake, is_dialler=False)
    assert len(fake.sent) == _CHALLENGE_BYTES
    handshake.receive(Kind.HELLO)
    raise AssertionError("a stranger was let in")


def _stranger_listens(stream: bytes) -> None:
    """A worker dials a stranger, which sends any bytes."""
    fake = _Socket(stream, 7)
    handshake = _handshake(fake, is_dialler=True)
    handshake.send(Kind.HELLO, Greeting(1))
    handshake.receive(Kind.WELCOME)
    raise AssertionError("a stranger was taken for a worker")


def _hello(fake: _Socket, text: bytes) -> bytearray:
    """Returns the frame of a proven greeting that answers the challenge sent over ``fake``."""
    challenge, answer = fake.sent[-NONCE_BYTES:], b"n" * NONCE_BYTES
    proof = _KEY.sign(b"dialler", challenge, answer, bytes((Kind.HELLO, 0)), text)
    return bytearray(b"".join(encode_frame(Kind.HELLO, 0, 0, proof + answer + text)))


def _member_dials(text: bytes) -> None:
    """A member of the run sends any text; the contents of its greeting are then read."""
    fake = _Socket()
    handshake = _handshake(fake, is_dialler=False)
    fake.data = bytes(_hello(fake, text)) + b"next frame"
    greeting = handshake.receive(Kind.HELLO)
    assert fake.data == b"next frame", "bytes past the greeting were read"
    assert type(greeting.worker) is int
    assert type(greeting.refusal) is str
    told, by_name = read_description(greeting.facts.get("capabilities"))
    assert isinstance(told, Facts)
    for channel in _CHANNELS:
        assert isinstance(channel.accept(_PEER, Meeting(_HERE, told, by_name[channel.name])), str)
    brought = greeting.facts.get("registration")
    if isinstance(brought, dict):
        assert_sound(Registration.decode(brought))


def _forger_dials(data: bytes) -> None:
    """One byte of a member's greeting was changed; a checksum decides which byte and how."""
    fake = _Socket()
    handshake = _handshake(fake, is_dialler=False)
    frame = _hello(fake, data)
    number = zlib.crc32(data)
    frame[HEADER_BYTES + (number >> 8) % (len(frame) - HEADER_BYTES)] ^= 1 + number % 255
    fake.data = bytes(frame)
    handshake.receive(Kind.HELLO)
    raise AssertionError("a greeting was altered, unnoticed")


_SCENES: tuple[Callable[[bytes], None], ...] = (
    _stranger_dials,
    _stranger_listens,
    _member_dials,
    _forger_dials,
)


def run(data: bytes) -> Exception | None:
    """Plays the scene of the first byte."""
    if not data:
        return None
    scene = _SCENES[data[0] % len(_SCENES)]
    try:
        scene(data[1:])
    except _MAY_RAISE as error:
        is_proof_wrong = isinstance(error, NotProven)
        assert scene is not _forger_dials or is_proof_wrong, "it was read before it was proven"
        return error
    return None


def _encoded(greeting: Greeting) -> bytes:
    return json.dumps(asdict(greeting)).encode()


def seeds() -> list[bytes]:
    """Returns greetings with every fact, and what strangers try."""
    capabilities = {
        "facts": read_facts().as_json(),
        "cma": {"address": 4096, "nonce": "ab" * 16},
        "shm": {"nonce": "cd" * 16},
        "cuda_ipc": {"obstacle": ""},
        "rdma": {"obstacle": "no device"},
        "striped": {},
    }
    facts = {"capabilities": capabilities, "verdict": {"cma": ""}, "to": 1}
    texts = [
        _encoded(Greeting(3, facts=facts)),
        _encoded(Greeting(3, facts={**facts, "registration": registration(3).as_json()})),
        _encoded(Greeting(3, "refused")),
        b"[" * 1000,
    ]
    guess = b"p" * PROOF_BYTES + b"n" * NONCE_BYTES + texts[0]
    challenger = _Socket()
    _handshake(challenger, is_dialler=False)
    hellos = [
        b"".join(encode_frame(Kind.HELLO, 0, 0, guess)),
        HEADER.pack(Kind.HELLO, 0, 0, LIMIT_BYTES, 0) + b"x" * 50,
        HEADER.pack(Kind.HELLO, 0, 0, LIMIT_BYTES + 1, 0),
        HEADER.pack(Kind.GOODBYE, 0, 0, 0, 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    welcome = b"".join(encode_frame(Kind.WELCOME, 0, 0, b"p" * PROOF_BYTES + b"{}"))
    return (
        [b"\0" + hello for hello in hellos]
        + [b"\1" + challenger.sent + said for said in (welcome, *hellos[2:])]
        + [b"\2" + text for text in texts]
        + [b"\3" + text for text in texts]
    )


TARGET = Target(
    "greeting",
    run,
    seeds,
    words=(*WORDS, b'"capabilities"', b'"registration"'),
    length_limit=2048,
    json_from=1,
)
