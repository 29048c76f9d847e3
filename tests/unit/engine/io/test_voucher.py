from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.engine.io.handshake import (
    VOUCHER_LIMIT_BYTES,
    Greeting,
    Handshake,
    frame_with,
    look_for_number,
    new_voucher,
    number_in,
)
from torchweft.engine.wire.frames import HEADER, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.errors import ProtocolError
from torchweft.secret import Secret

KEY, OTHER_KEY = Secret(b"the key of the run"), Secret(b"the key of another run")
ME = 7
LIMIT_S = 10.0


def test_a_voucher_is_for_one_worker_of_one_run() -> None:
    voucher = new_voucher(KEY, ME).encode()
    assert number_in(voucher, KEY, ME + 1) is None
    assert number_in(voucher, OTHER_KEY, ME) is None


def test_every_digit_of_a_voucher_counts() -> None:
    voucher = new_voucher(KEY, ME).encode()
    for place, digit in enumerate(voucher):
        changed = voucher[:place] + bytes((digit ^ 1,)) + voucher[place + 1 :]
        assert number_in(changed, KEY, ME) is None


@given(st.binary(max_size=200))
def test_other_bytes_are_no_voucher(said: bytes) -> None:
    assert number_in(said, KEY, ME) is None
    assert number_in(said + b".voucher.weft", KEY, ME) is None


def test_a_look_takes_nothing_and_never_waits() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(LIMIT_S)
    with ours, theirs:
        began_s = time.monotonic()
        assert look_for_number(theirs, KEY, ME) is None
        assert time.monotonic() - began_s < LIMIT_S / 2
        voucher = frame_with(new_voucher(KEY, ME))
        ours.sendall(voucher)
        assert look_for_number(theirs, KEY, ME) == number_in(voucher, KEY, ME)
        assert theirs.recv(1000) == voucher
        ours.close()
        assert look_for_number(theirs, KEY, ME) is None
    assert look_for_number(theirs, KEY, ME) is None  # It is closed.


@pytest.fixture
def greeted() -> tuple[socket.socket, Handshake, Handshake, socket.socket]:
    ours, theirs = socket.socketpair()
    deadline_s = time.monotonic() + LIMIT_S
    acceptor = Handshake.accept(theirs, KEY, deadline_s)
    return ours, Handshake.dial(ours, KEY, deadline_s), acceptor, theirs


Greeted = tuple[socket.socket, Handshake, Handshake, socket.socket]


def test_a_greeting_may_follow_a_voucher(greeted: Greeted) -> None:
    ours, dialler, acceptor, theirs = greeted
    with ours, theirs:
        ours.sendall(frame_with(new_voucher(KEY, ME)))
        dialler.send(Kind.HELLO, Greeting(3))
        assert acceptor.receive(Kind.HELLO) == Greeting(3)
        acceptor.send(Kind.WELCOME, Greeting(4))
        assert dialler.receive(Kind.WELCOME) == Greeting(4)


@pytest.mark.parametrize(
    "said",
    [
        frame_with(new_voucher(KEY, ME)) * 2,
        b"".join(encode_frame(Kind.VOUCHER, 0, 0, bytes(VOUCHER_LIMIT_BYTES + 1))),
        HEADER.pack(Kind.VOUCHER, 0, 0, 1 << 31, 0),
        HEADER.pack(Kind.VOUCHER, 0, 1, 10, 0),
    ],
    ids=["twice", "too large", "much too large", "with buffers"],
)
def test_a_greeting_follows_one_small_voucher_and_no_more(greeted: Greeted, said: bytes) -> None:
    ours, dialler, acceptor, theirs = greeted
    with ours, theirs:
        ours.sendall(said)
        dialler.send(Kind.HELLO, Greeting(3))
        with pytest.raises(ProtocolError, match="does not speak"):
            acceptor.receive(Kind.HELLO)


def test_a_voucher_comes_before_the_greeting_only(greeted: Greeted) -> None:
    ours, dialler, acceptor, theirs = greeted
    with ours, theirs:
        dialler.send(Kind.HELLO, Greeting(3))
        acceptor.receive(Kind.HELLO)
        ours.sendall(frame_with(new_voucher(KEY, ME)))
        with pytest.raises(ProtocolError, match="does not speak"):
            acceptor.receive(Kind.VERDICT)
