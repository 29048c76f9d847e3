from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.wire.frames import Buffer, encode_frame
from torchweft.engine.wire.messages import Kind, encode_ints
from torchweft.engine.wire.session import (
    ACKNOWLEDGE_BYTES,
    ALONE_BYTES,
    LEAST_BYTES,
    Incoming,
    Outgoing,
)
from torchweft.errors import ProtocolError


def joined(parts: Sequence[Buffer]) -> bytes:
    return b"".join(bytes(part) for part in parts)


def test_what_is_not_acknowledged_is_kept_to_be_sent_again() -> None:
    outgoing = Outgoing()
    outgoing.keep([b"abc", b"defg"])
    outgoing.keep([b"hi"])
    assert outgoing.position == outgoing.kept_bytes == 9
    assert joined(outgoing.since(0)) == b"abcdefghi"
    assert joined(outgoing.since(5)) == b"fghi"
    outgoing.acknowledge(4)
    assert outgoing.kept_bytes == 5
    assert joined(outgoing.since(4)) == b"efghi"
    assert outgoing.since(9) == []


def test_nothing_is_copied() -> None:
    outgoing, tensor = Outgoing(), memoryview(bytearray(b"before"))
    outgoing.keep([tensor])
    tensor[:6] = b"after!"
    assert outgoing.since(0)[0] is tensor
    assert joined(outgoing.since(2)) == b"ter!"


def test_what_was_acknowledged_is_let_go_of() -> None:
    outgoing, tensor = Outgoing(), bytearray(10)
    outgoing.keep([memoryview(tensor)])
    outgoing.acknowledge(9)
    with pytest.raises(BufferError):
        tensor.append(1)  # The last byte may have to be sent again.
    outgoing.acknowledge(10)
    tensor.append(1)


def test_an_old_acknowledgement_changes_nothing() -> None:
    outgoing = Outgoing()
    outgoing.keep([b"abcdef"])
    outgoing.acknowledge(4)
    outgoing.acknowledge(2)
    assert outgoing.acknowledged == 4
    assert joined(outgoing.since(4)) == b"ef"


def test_nobody_can_acknowledge_what_was_not_sent() -> None:
    outgoing = Outgoing()
    outgoing.keep([b"abc"])
    with pytest.raises(ProtocolError, match="4 bytes are acknowledged, of 3"):
        outgoing.acknowledge(4)
    assert joined(outgoing.since(0)) == b"abc"


@pytest.mark.parametrize("position", [0, 1, 7, 1 << 70])
def test_the_stream_goes_on_only_where_it_is_kept(position: int) -> None:
    outgoing = Outgoing()
    outgoing.keep([b"abcdef"])
    outgoing.acknowledge(2)
    with pytest.raises(ProtocolError, match=f"at byte {position}: bytes 2 to 6 are kept"):
        outgoing.since(position)


def test_a_session_that_has_ended_keeps_nothing() -> None:
    outgoing, tensor = Outgoing(), bytearray(10)
    outgoing.keep([memoryview(tensor)])
    outgoing.clear()
    tensor.append(1)


def test_much_is_acknowledged_at_once_less_with_a_message_and_little_when_asked() -> None:
    incoming = Incoming()
    incoming.position += ACKNOWLEDGE_BYTES - 1
    assert not incoming.is_due
    incoming.position += 1
    assert incoming.is_due
    assert not incoming.is_much
    assert incoming.acknowledgement() == ACKNOWLEDGE_BYTES
    assert incoming.acknowledgement() is None
    assert not incoming.is_due
    incoming.position += ALONE_BYTES
    assert incoming.is_much
    assert incoming.acknowledgement() == ACKNOWLEDGE_BYTES + ALONE_BYTES
    incoming.position += LEAST_BYTES + 1
    assert not incoming.is_much
    assert incoming.acknowledgement() == ACKNOWLEDGE_BYTES + ALONE_BYTES + LEAST_BYTES + 1


@pytest.mark.parametrize("position", [0, 1 << 40])
def test_acknowledgements_are_not_acknowledged(position: int) -> None:
    """Otherwise two idle peers would acknowledge each other forever."""
    (frame,) = encode_frame(Kind.ACKNOWLEDGED, 0, 0, encode_ints(position))
    incoming = Incoming()
    incoming.position += len(frame)
    assert incoming.acknowledgement() is None
    # Every frame with a tensor is longer.
    least = b"".join(encode_frame(Kind.CALL, 0, 0, b"", [memoryview(b"x")]))
    assert len(least) > len(frame)
    incoming.position += len(least)
    assert incoming.acknowledgement() == len(frame) + len(least)


class Stream:
    """One direction of a session: its two sides, and the bytes in flight."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.incoming = Incoming()
        self.under_way = b""
        self.arrived = b""
        self.acknowledgements: list[int] = []

    def send(self, parts: list[bytes]) -> None:
        self.outgoing.keep(parts)
        self.under_way += b"".join(parts)

    def deliver(self, size: int) -> None:
        came, self.under_way = self.under_way[:size], self.under_way[size:]
        self.arrived += came
        self.incoming.position += len(came)

    def say(self) -> None:
        position = self.incoming.acknowledgement()
        if position is not None:
            self.acknowledgements.append(position)

    def hear(self, count: int) -> None:
        for position in self.acknowledgements[:count]:
            self.outgoing.acknowledge(position)
        del self.acknowledgements[:count]

    def resume(self) -> None:
        """Loses bytes and acknowledgements in flight, and resumes after the last byte received."""
        self.acknowledgements.clear()
        self.under_way = joined(self.outgoing.since(self.incoming.position))
        self.outgoing.acknowledge(self.incoming.position)


steps = st.one_of(
    st.tuples(st.just(Stream.send), st.lists(st.binary(max_size=60), max_size=4)),
    st.tuples(st.just(Stream.deliver), st.integers(0, 150)),
    st.tuples(st.just(Stream.say)),
    st.tuples(st.just(Stream.hear), st.integers(0, 3)),
    st.tuples(st.just(Stream.resume)),
)


@settings(max_examples=examples(200))
@given(st.lists(steps, max_size=40))
def test_whatever_breaks_the_stream_arrives_once_and_in_order(
    taken: list[tuple[object, ...]],
) -> None:
    stream, sent = Stream(), b""
    for step, *arguments in taken:
        step(stream, *arguments)  # type: ignore[operator]
        if step is Stream.send:
            sent += b"".join(arguments[0])  # type: ignore[arg-type]
        assert sent.startswith(stream.arrived)
        assert stream.outgoing.acknowledged <= stream.incoming.position <= stream.outgoing.position
    stream.resume()
    stream.deliver(len(sent))
    assert stream.arrived == sent
    stream.resume()
    assert stream.outgoing.kept_bytes == 0
    assert joined(stream.outgoing.since(len(sent))) == b""
