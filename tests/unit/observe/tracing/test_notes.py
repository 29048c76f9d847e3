"""What is kept of a message has its numbers, and no byte of a value."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


def test_frames_that_are_written_together_are_noted_one_by_one(
    traced: tuple[FakeLink, Rows],
) -> None:
    link, rows = traced
    first = encode_frame(Kind.GRADIENTS, 0, 5, b"c" * 60, [memoryview(b"x" * 9000)] * 2)
    small = encode_frame(Kind.GRADIENTS, 0, 6, b"c" * 60, [memoryview(b"x" * 10)])
    empty = encode_frame(Kind.GRADIENTS, 0, 7, b"c" * 60, [memoryview(b"")] * 2)
    assert [len(each) for each in (first, small, empty)] == [3, 2, 3]
    link.send([*first, *small, *empty, REPLY], may_block=True)
    sizes = [sum(map(len, each)) for each in (first, small, empty, [REPLY])]
    found = messages(rows)
    assert all(each.category == "send" for each in found)
    assert [each.args["bytes"] for each in found] == sizes
    assert [each.args["kind"] for each in found] == ["gradients"] * 3 + ["reply"]
    assert [each.args.get("tensors", {}).get("stream", 0) for each in found] == [18_000, 10, 0, 0]
    assert [each.args["to"] for each in found] == ["worker 4"] * 4
    assert all(each.began_s <= each.ended_s for each in found)


@pytest.mark.parametrize("frame", [each for each, _ in CASES])
def test_a_message_that_is_written_alone_is_noted_as_among_others(
    traced: tuple[FakeLink, Rows], frame: Buffer
) -> None:
    link, rows = traced
    link.send([frame], may_block=True)
    link.send([frame, frame], may_block=True)
    alone, first, _ = messages(rows)
    assert alone._replace(began_s=0.0, ended_s=0.0) == first._replace(began_s=0.0, ended_s=0.0)
    assert alone.began_s < alone.ended_s


@pytest.mark.parametrize(("frame", "expected"), CASES)
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_no_byte_of_a_value_is_in_a_row(
    traced: tuple[FakeLink, Rows],
    frame: Buffer,
    expected: Message,
    kind: Callable[[Buffer], Buffer],
) -> None:
    link, rows = traced
    link.send([kind(frame)], may_block=True)
    number, control = int.from_bytes(frame[8:16], "little"), kind(frame[HEADER_BYTES:])
    noted = Frame(frame[0], frame[1], number, control, ())
    tap(rows).received(noted)
    assert len(rows) == 2
    fields = [each for row in rows._rows for each in row]
    kept = [bytes(each) for each in fields if not isinstance(each, (int, float))]
    assert not any(map(has_secret, kept))
    sent, received = messages(rows)
    for each in sent, received:
        assert each.args["bytes"] == len(frame)
        assert each.args.get("context", 0) == expected.context_id
        tensors = each.args.get("tensors", {})
        assert tensors.get("inline", 0) == (expected.inline_bytes if each is sent else 0)
        assert f".{number}" in each.arrow


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


@pytest.mark.parametrize("sizes", [(), (10,), (9000, 1), (9000, 0)])
def test_the_size_of_a_received_frame_is_that_on_the_connection(
    traced: tuple[FakeLink, Rows], sizes: tuple[int, ...]
) -> None:
    link, rows = traced
    control = encode(NAME, Failed(1, "op", SECRET)) + b"c" * 500
    buffers = [memoryview(b"x" * size) for size in sizes]
    parts = encode_frame(Kind.BACKWARD, 16, 5, control, buffers)
    link.receives([*parts, REPLY])
    first, second = messages(rows)
    assert first.category == second.category == "receive"
    assert (first.args["bytes"], first.args["from"]) == (sum(map(len, parts)), "worker 4")
    assert (second.args["bytes"], second.args["context"]) == (len(REPLY), 3)
