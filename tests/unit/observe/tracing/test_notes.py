"""What is kept of a message has its numbers, and no byte of a value."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.autograd.codec import PassMode, PassName, encode
from torchweft.engine.io.link import Link
from torchweft.engine.protocol.backward import Failed, Gradients, Progress
from torchweft.engine.wire.frames import HEADER_BYTES, Buffer, Frame, FrameParser, encode_frame
from torchweft.engine.wire.messages import (
    NO_GRAD,
    Kind,
    encode_call,
    encode_reply,
)
from torchweft.observe.tracing.notes import Rows, TracingWatcher
from torchweft.observe.tracing.slices import Slicer
from torchweft.rpc.watching import Message, _Tap

SECRET = b"the values of the program"
HEAD = (1.0, 9, 3, 8, b"module:function")


def framed(kind: Kind, control: bytes) -> Buffer:
    return encode_frame(kind, 0, 7, control)[0]


CALL = framed(Kind.CALL, encode_call(*HEAD, b"", (), SECRET, b"t" * 30))
IN_SPAN = encode_call(*HEAD, b"a context", (), SECRET, b"t" * 30)
REPLY = framed(Kind.REPLY, encode_reply(3, 8, (), SECRET, b"t" * 20))
PORT = encode_call(1.0, -1, 0, 0, SECRET, b"", (), SECRET, b"t" * 10)
OUTSIDE = encode_call(1.0, -1, NO_GRAD, 0, b"m:f", b"", (), SECRET)
NAME = PassName(3, 5, 4, PassMode())

GRADIENTS = encode(NAME, Gradients(8, (), Progress([1], [2])), 0, SECRET) + b"t" * 12


def ids(
    context_id: int = 0, message_id: int = 0, creation: int = -1, inline_bytes: int = 0
) -> Message:
    return Message("", 0, 0, context_id, message_id, creation, inline_bytes)


CASES = [
    (CALL, ids(3, 8, 9, 30)),
    (framed(Kind.CALL, OUTSIDE), ids(0, 0, -1, 0)),
    (framed(Kind.CALL, IN_SPAN), ids(3, 8, 9, 30)),
    (REPLY, ids(3, 8, -1, 20)),
    (framed(Kind.POST, PORT), ids(inline_bytes=10)),
    (
        encode_frame(Kind.GRADIENTS, 0, 5, GRADIENTS)[0],
        ids(3, 8, inline_bytes=12),
    ),
    (encode_frame(Kind.BACKWARD, 0, 5, encode(NAME, Failed(1, "op", SECRET)))[0], ids(3)),
    (encode_frame(Kind.GOODBYE, 0, 0, SECRET)[0], ids()),
]


def has_secret(kept: bytes) -> bool:
    return any(SECRET[part : part + 4] in kept for part in range(len(SECRET) - 3))


class FakeLink(Link):
    """A link that writes to nowhere."""

    def __init__(self) -> None:
        self.incoming = deque()
        self.parser = FrameParser(lambda size: memoryview(bytearray(size)), 4096, 4096, 1 << 20)
        self._bytes_received = 0
        self._stream = SimpleNamespace(bytes_sent=0, bytes_received=0, is_looking=False)
        self._is_closed = False

    def _send(self, parts: list[Buffer], may_block: bool) -> None: ...

    def receives(self, parts: list[Buffer]) -> None:
        """Receives what was sent, at most two hundred bytes at a time."""
        sent = memoryview(b"".join(parts))
        while sent:
            space = self.parser.space()[0][:200]
            size = min(len(space), len(sent))
            space[:size], sent = sent[:size], sent[size:]
            for frame in self.parser.received(size):
                assert self.watcher is not None
                self.watcher.received(frame)


@pytest.fixture
def traced() -> tuple[FakeLink, Rows]:
    """A link to worker 4, and the rows of what it has sent and received."""
    rows, link = Rows(100), FakeLink()
    link.watcher = tap(rows)
    return link, rows


def tap(rows: Rows) -> Any:
    return _Tap(TracingWatcher(rows), 4)


def messages(rows: Rows) -> list[Any]:
    found, ends, _ = rows.end()
    return Slicer(found, ends, 0, "worker {}".format, ())._messages


@pytest.mark.parametrize("size", [0, 1, 20])
def test_a_control_part_that_is_too_short_has_no_numbers(
    size: int,
) -> None:
    rows = Rows(100)
    for kind in (Kind.CALL, Kind.REPLY, Kind.GRADIENTS):
        tap(rows).received(Frame(kind, 0, 5, CALL[HEADER_BYTES:][:size], ()))
    for found in messages(rows):
        assert found.args["bytes"] == HEADER_BYTES + size
        assert "context" not in found.args
