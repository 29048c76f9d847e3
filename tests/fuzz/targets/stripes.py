"""Data connections: stripes of transfers, as a hostile peer would send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fuzz.target import Target
from torchweft.engine.channels.stripes import (
    HEADER_BYTES,
    Arrivals,
    ReceivingConnection,
    Stripe,
    decode_stripe,
)
from torchweft.errors import ProtocolError

_LIMIT_BYTES = 256
_TURN_BYTES = 1 << 20


class _Socket:
    """A fake socket: returns its data, at most ``piece_bytes`` at once, and then the end."""

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        self._data = data
        self._piece_bytes = piece_bytes

    def recvmsg_into(self, parts: Sequence[memoryview]) -> tuple[int]:
        assert any(part.nbytes for part in parts), "an empty space looks like the end"
        size = 0
        for part in parts:
            piece = self._data[: min(len(part), self._piece_bytes - size)]
            part[: len(piece)] = piece
            self._data = self._data[len(piece) :]
            size += len(piece)
        return (size,)

    def setblocking(self, is_blocking: bool) -> None: ...

    def fileno(self) -> int:
        return -1

    def close(self) -> None: ...


def _receive(data: bytes, piece_bytes: int) -> tuple[Exception, Arrivals, int]:
    """Returns how the connection ended, the transfers, and how often memory was taken."""
    taken: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        assert 0 < size_bytes <= _LIMIT_BYTES, f"{size_bytes} bytes at once"
        taken.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    arrivals = Arrivals(allocate, _LIMIT_BYTES)
    fake: Any = _Socket(data, piece_bytes)
    connection = ReceivingConnection(fake, arrivals, 1, lambda cause: None)
    try:
        connection._read(_TURN_BYTES)
    except (EOFError, ProtocolError) as error:
        return error, arrivals, len(taken)
    finally:
        connection.close()
    raise AssertionError("it ended without the end of what came")


def run(data: bytes) -> Exception | None:
    """Receives stripes in pieces of the size in the first byte, and in one go."""
    if not data:
        return None
    cut, stream = data[0] + 1, data[1:]
    ending, arrivals, taken_count = _receive(stream, cut)
    whole_ending, others, _ = _receive(stream, 1 << 20)
    assert type(ending) is type(whole_ending), (ending, whole_ending)
    assert len(arrivals.under_way) == len(others.under_way)
    assert taken_count <= len(stream) // HEADER_BYTES, "memory without a header"
    if len(stream) >= HEADER_BYTES:
        try:
            stripe = decode_stripe(memoryview(stream)[:HEADER_BYTES], _LIMIT_BYTES)
        except ProtocolError as error:
            return error
        assert 0 < stripe.length_bytes <= stripe.size_bytes - stripe.offset
        assert stripe.encode() == stream[:HEADER_BYTES]
    return ending if isinstance(ending, ProtocolError) else None


def seeds() -> list[bytes]:
    """Returns transfers in one and in several stripes, in and out of order."""
    whole = Stripe(1, 0, 0, 20, 20).encode() + b"x" * 20
    first = Stripe(2, 0, 0, 30, 50).encode() + b"y" * 30
    second = Stripe(2, 0, 30, 20, 50).encode() + b"z" * 20
    largest = Stripe(3, 1, 0, _LIMIT_BYTES, _LIMIT_BYTES).encode() + b"l" * _LIMIT_BYTES
    streams = (whole, first + second, second + whole + first, first + first, largest, first[:50])
    return [bytes([cut]) + stream for stream in streams for cut in (9, 40, 255)]


TARGET = Target("stripes", run, seeds, length_limit=700)
