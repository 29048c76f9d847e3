"""Sessions: whatever a peer claims to have received, the stream continues with the right bytes.

Each step is four bytes: an event and a number. A plain string of all bytes ever sent gives the
expected result.
"""

from __future__ import annotations

import struct

from tests.fuzz.target import Target
from torchweft.engine.wire.session import ACKNOWLEDGE_BYTES, ALONE_BYTES, Incoming, Outgoing
from torchweft.errors import ProtocolError

_PATTERN = bytes(range(256)) * 3
_STEP = struct.Struct("<Bxh")
_KEEP, _ACKNOWLEDGE, _RESUME, _RECEIVE = range(4)


class _Peer:
    """One side of a session whose other side may claim anything."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.incoming = Incoming()
        self.sent = b""
        self.told = 0

    def step(self, kind: int, number: int) -> None:
        outgoing = self.outgoing
        if kind == _KEEP:
            start = len(self.sent) & 0xFF
            part = _PATTERN[start : start + abs(number) % 300]
            outgoing.keep([part[:7], part[7:]] if len(part) > 7 else [part])
            self.sent += part
        elif kind == _ACKNOWLEDGE:
            before = outgoing.acknowledged
            outgoing.acknowledge(number)
            assert outgoing.acknowledged == max(before, number)
        elif kind == _RESUME:
            before = outgoing.acknowledged
            rest = b"".join(bytes(part) for part in outgoing.since(number))
            assert before <= number <= len(self.sent)
            assert rest == self.sent[number:], "other bytes than were sent"
        else:
            size_bytes = abs(number)
            self.incoming.position += size_bytes
            assert self.incoming.is_much == (self.incoming.position - self.told >= ALONE_BYTES)
            assert self.incoming.is_due == (self.incoming.position - self.told >= ACKNOWLEDGE_BYTES)
            position = self.incoming.acknowledgement()
            if position is not None:
                assert self.told < position == self.incoming.position
                self.told = position
            assert self.incoming.position - self.told < ACKNOWLEDGE_BYTES

    def check(self) -> None:
        outgoing = self.outgoing
        assert outgoing.position == len(self.sent)
        assert 0 <= outgoing.acknowledged <= outgoing.position
        assert outgoing.kept_bytes == outgoing.position - outgoing.acknowledged


def run(data: bytes) -> Exception | None:
    """Plays the steps; continues after a refused claim, which must not change anything."""
    peer = _Peer()
    refusal: Exception | None = None
    for kind, number in _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size]):
        try:
            peer.step(kind % 4, number)
        except ProtocolError as error:
            refusal = error
        peer.check()
    return refusal


def _steps(*steps: tuple[int, int]) -> bytes:
    return b"".join(_STEP.pack(*step) for step in steps)


def seeds() -> list[bytes]:
    """Returns sessions that break at the ends and in the middle of buffers."""
    sending = [(_KEEP, size) for size in (5, 100, 1, 0, 299)]
    return [
        _steps(*sending, (_RESUME, 0), (_ACKNOWLEDGE, 60), (_RESUME, 60), (_RESUME, 106)),
        _steps(*sending, (_ACKNOWLEDGE, 105), (_RESUME, 104), (_RESUME, 405)),
        _steps(*sending, (_ACKNOWLEDGE, 406), (_RESUME, 406)),
        _steps((_RECEIVE, 20_000), (_RECEIVE, 30_000), (_RECEIVE, 0)),
        _steps((_ACKNOWLEDGE, 0), (_RESUME, 0), (_RESUME, -1), (_ACKNOWLEDGE, -1)),
    ]


TARGET = Target("session", run, seeds)
