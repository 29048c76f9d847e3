from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.unit.engine.worker.group import FRONT, Member, group_of
from torchweft import knobs
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import (
    NO_CREATION,
    TABLES,
    Kind,
    encode_tables,
)
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.tensor_messages import (
    LocalMessage,
    TensorMessages,
    local_frame,
)
from torchweft.errors import ProtocolError, SerializationError

LIMIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[list[Member]]:
    with (
        knobs.CMA_FROM_BYTES.override(100_000),
        knobs.SHM_LIMIT_BYTES.override(0),
        group_of(2) as members,
    ):
        yield members


def send(sender: Member, to: Peer, tensors: list[Tensor]) -> None:
    sender.agent.sender.send(to, sender.tensor_messages.encode(to, Kind.CALL, 0, 7, FRONT, tensors))


def test_a_message_to_oneself_is_an_object_in_place_of_bytes(pair: list[Member]) -> None:
    first = pair[0]
    came = threading.Event()
    frames: list[Frame] = []

    def keep(peer: Peer, frame: Frame) -> None:
        assert peer is first.agent.me
        frames.append(frame)
        came.set()

    first.agent.receiver.on(Kind.CALL, keep, inline=False)
    first.start()
    tensor, external = torch.ones(3, requires_grad=True), object()
    head = (1.0, NO_CREATION, b"name", (0, 0, (), 0, 0))
    sent = LocalMessage(head, b"payload", [tensor], [external])
    first.agent.sender.send(first.agent.me, local_frame(Kind.CALL, 0, 7, sent))
    assert came.wait(LIMIT_S)
    [frame] = frames
    assert (frame.kind, frame.flags, frame.id) == (Kind.CALL, 0, 7)
    received: object = frame.control
    assert received is sent
    assert (sent.tensors[0], sent.externals[0]) == (tensor, external)


@pytest.mark.parametrize(
    "control",
    [b"", b"\xff" * 16, bytes(7), FRONT + encode_tables(b"", b"x"), encode_tables(b"x", b"x")],
)
def test_a_malformed_message_is_refused(pair: list[Member], control: bytes) -> None:
    first, second = pair
    messages, frame = first.tensor_messages, Frame(Kind.CALL, TABLES, 1, control, ())
    with pytest.raises(ProtocolError):
        messages.fetch(first.peer(second), messages.read(frame))


def test_a_sender_keeps_to_the_limit_of_tensors(pair: list[Member]) -> None:
    first, second = pair
    limited = TensorMessages.__new__(TensorMessages)
    vars(limited).update(vars(first.tensor_messages), _tensor_limit=2)
    to = first.peer(second)
    with pytest.raises(SerializationError, match="this worker sends at most 2"):
        limited.encode(to, Kind.CALL, 0, 7, FRONT, [torch.ones(1) for _ in range(3)])
    assert limited.encode(to, Kind.CALL, 0, 7, FRONT, [torch.ones(1), torch.ones(1)])
