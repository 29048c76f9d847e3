"""What is kept of a message has its numbers, and no byte of a value."""

from __future__ import annotations

import pytest

from torchweft.autograd.codec import PassMode, PassName, encode, encode_head
from torchweft.autograd.outside import NO_GRAD
from torchweft.protocol.backward import Failed, Gradients, Progress
from torchweft.protocol.observing.trace import SENT, Received, Sent
from torchweft.rpc.tracing.heads import Ids, head_in, ids_in
from torchweft.rpc.tracing.links import traced_link
from torchweft.rpc.tracing.rows import PACK_SENT, unpacked
from torchweft.transport.link import Link
from torchweft.wire.frames import HEADER_BYTES, Buffer, Frame, encode_frame
from torchweft.wire.messages import (
    PLAIN,
    Kind,
    code_names,
    encode_call,
    encode_post,
    encode_reply,
    in_span,
    with_code,
)

SECRET = b"the values of the program"
CALL = encode_call(4, 1.0, 9, 3, 8, b"module:function", (), SECRET, b"t" * 30)
REPLY = encode_reply(7, 0, 3, 8, (), SECRET, b"t" * 20)
NAME = PassName(3, 5, 4, PassMode())

GRADIENTS = encode_head(NAME, Gradients(8, (), Progress([1], [2])), 0, len(SECRET))
GRADIENTS += SECRET + b"t" * 12

CASES = [
    (CALL, Ids(3, 8, 9, 30)),
    (encode_call(4, 1.0, -1, NO_GRAD, 0, b"m:f", (), SECRET), Ids(0, 0, -1, 0)),
    (with_code(CALL, code_names((1, 2))), Ids(3, 8, 9, 30)),
    (in_span([CALL], b"a context")[0], Ids(3, 8, 9, 30)),
    (in_span([with_code(CALL, code_names((1, 2)))], b"a context")[0], Ids(3, 8, 9, 30)),
    (REPLY, Ids(3, 8, -1, 20)),
    (encode_post(6, SECRET, b"t" * 10), Ids(inline_bytes=10)),
    (
        encode_frame(Kind.GRADIENTS, 0, 5, GRADIENTS)[0],
        Ids(3, 8, inline_bytes=12),
    ),
    (encode_frame(Kind.BACKWARD, 0, 5, encode(NAME, Failed(1, "op", SECRET)))[0], Ids(3)),
    (encode_frame(Kind.GOODBYE, 0, 0, SECRET)[0], Ids()),
]


@pytest.mark.parametrize(("frame", "expected"), CASES)
def test_the_numbers_of_a_message_are_kept_and_no_value(frame: Buffer, expected: Ids) -> None:
    kind, flags, control = frame[0], frame[1], frame[HEADER_BYTES:]
    head = head_in(kind, flags, control)
    assert ids_in(kind, flags, head, len(control)) == expected
    for part in range(len(SECRET) - 3):
        assert SECRET[part : part + 4] not in head
    pack = PACK_SENT[kind]
    if pack is not None:
        row = pack(SENT, 5, 1.0, 2.0, 7, 4, len(frame), frame)
        assert row[-len(head) :] == head


class FakeLink(Link):
    """A link that writes to nowhere, and receives what it is given."""

    def __init__(self) -> None:
        self.given: list[list[Frame]] = []
        self.traced_peer = 4

    def send(self, parts: list[Buffer], *, may_block: bool) -> None: ...

    def receive(self, *, may_block: bool) -> list[Frame]:
        return self.given.pop()


def test_frames_that_are_written_together_are_noted_one_by_one() -> None:
    rows: list[bytes] = []
    link = FakeLink()
    link.__class__ = traced_link(FakeLink, rows.append, iter(range(9)).__next__)
    first = encode_frame(Kind.GRADIENTS, 0, 5, b"c" * 60, [memoryview(b"x" * 9000)] * 2)
    joined = encode_frame(Kind.GRADIENTS, 0, 6, b"c" * 60, [memoryview(b"x" * 10)])
    empty = encode_frame(Kind.GRADIENTS, 0, 7, b"c" * 60, [memoryview(b"")] * 2)
    assert [len(each) for each in (first, joined, empty)] == [3, 1, 3]
    link.send([*first, *joined, *empty, REPLY], may_block=True)
    sizes = [sum(map(len, each)) for each in (first, joined, empty, [REPLY])]
    found = [Sent._make(unpacked(row, ())[2:]) for row in rows]
    assert [each.size_bytes for each in found] == sizes
    assert [each.kind for each in found] == [Kind.GRADIENTS] * 3 + [Kind.REPLY]
    assert [each.stream_bytes for each in found] == [18_000, 10, 0, 0]
    assert [each.peer for each in found] == [4] * 4
    assert all(each.began_s <= each.ended_s for each in found)


def test_the_size_of_a_received_frame_is_that_on_the_connection() -> None:
    rows: list[bytes] = []
    link = FakeLink()
    link.__class__ = traced_link(FakeLink, rows.append, iter(range(9)).__next__)
    frame = Frame(Kind.GRADIENTS, PLAIN, 5, b"c" * 60, [b"x" * 9000, b"y"])
    link.given.append([frame])
    assert link.receive(may_block=False) == [frame]
    parts = encode_frame(
        Kind.GRADIENTS, 0, 5, b"c" * 60, [memoryview(b"x" * 9000), memoryview(b"y")]
    )
    (row,) = rows
    found = Received._make(unpacked(row, ())[2:])
    assert (found.size_bytes, found.number) == (sum(map(len, parts)), 5)
