from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from torchweft.engine.wire.frames import Buffer
from torchweft.engine.wire.session import (
    Incoming,
    Outgoing,
)


def joined(parts: Sequence[Buffer]) -> bytes:
    return b"".join(bytes(part) for part in parts)


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
