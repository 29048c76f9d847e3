from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.memory_counts import first_for, held_counts
from tests.unit.engine.worker.group import FRONT, Member, Received, group_of
from torchweft import knobs
from torchweft.engine.channels import pull
from torchweft.engine.codec.tensors import COMPUTED, REQUIRES_GRAD
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
    TensorMessage,
    TensorMessages,
    local_frame,
)
from torchweft.errors import ProtocolError, SerializationError

LIMIT_S = 20.0
SMALL = [torch.arange(6.0).reshape(2, 3).t(), torch.zeros(0, 4), torch.tensor(True)]


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


def check_arrival(message: TensorMessage, tensors: list[Tensor]) -> None:
    arrived = message.tensors()[0]
    assert len(arrived) == len(tensors)
    for got, sent in zip(arrived, tensors, strict=True):
        assert torch.equal(got, sent)
        assert got.stride() == sent.stride()


@pytest.mark.parametrize("size", [0, 10, 20_000, 1_000_000], ids=["none", "10", "20k", "1M"])
def test_tensors_arrive_by_whatever_channel(pair: list[Member], size: int) -> None:
    first, second = pair
    received = Received(second)
    first.start()
    second.start()
    tensors = [*SMALL, torch.randn(size)] if size else []
    send(first, first.peer(second), tensors)
    check_arrival(received.next(), tensors)


def test_the_flags_of_a_message_are_kept_beside_that_of_its_tables(pair: list[Member]) -> None:
    first, second = pair
    parts = first.tensor_messages.encode(
        first.peer(second), Kind.CALL, 0, 7, FRONT, [torch.ones(1)]
    )
    assert bytes(parts[0])[:2] == bytes((Kind.CALL, TABLES))


def test_what_was_pulled_is_let_go_at_the_sender(pair: list[Member]) -> None:
    first, second = pair
    received = Received(second)
    first.start()
    second.start()
    peer = first.peer(second)
    send(first, peer, [])  # connects
    received.next()
    for _ in range(3):
        send(first, peer, [torch.ones(500_000)])
        check_arrival(received.next(), [torch.ones(500_000)])
    wait_until_released(peer)


def wait_until_released(peer: Peer) -> None:
    released = threading.Event()
    for _ in range(2000):
        if not peer.held._held:
            return
        released.wait(0.001)
    raise AssertionError("the sender goes on holding what was pulled")


def test_what_nobody_reads_is_let_go_at_the_sender(pair: list[Member]) -> None:
    first, second = pair
    came = threading.Event()

    def discard(peer: Peer, frame: Frame) -> None:
        second.tensor_messages.discard(peer, second.tensor_messages.read(frame))
        came.set()

    second.agent.receiver.on(Kind.CALL, discard, inline=False)
    first.start()
    second.start()
    send(first, first.peer(second), [torch.ones(500_000)])
    assert came.wait(LIMIT_S)
    wait_until_released(first.peer(second))


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


def test_tensors_that_require_grad_are_told(pair: list[Member]) -> None:
    first, second = pair
    received = Received(second)
    first.start()
    second.start()
    leaf = torch.ones(2, requires_grad=True)
    for tensors in ([leaf, torch.zeros(2)], [leaf * 2, leaf]):
        send(first, first.peer(second), tensors)
        message = received.next()
        arrived, told = message.tensors()
        assert [t.requires_grad for t in arrived] == [False, False]
        for flags, tensor in zip(told, tensors, strict=True):
            assert bool(flags & REQUIRES_GRAD) == tensor.requires_grad
            assert bool(flags & COMPUTED) == (tensor.requires_grad and not tensor.is_leaf)


def test_a_message_without_tensors_has_no_flags(pair: list[Member]) -> None:
    first, second = pair
    received = Received(second)
    first.start()
    second.start()
    send(first, first.peer(second), [])
    assert received.next().tensors() == ([], b"")


@pytest.mark.parametrize(
    "control",
    [b"", b"\xff" * 16, bytes(7), FRONT + encode_tables(b"", b"x"), encode_tables(b"x", b"x")],
)
def test_a_malformed_message_is_refused(pair: list[Member], control: bytes) -> None:
    first, second = pair
    messages, frame = first.tensor_messages, Frame(Kind.CALL, TABLES, 1, control, ())
    with pytest.raises(ProtocolError):
        messages.fetch(first.peer(second), messages.read(frame))


def test_what_cannot_be_pulled_is_streamed(
    pair: list[Member], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(1, "not permitted")

    first, second = pair
    received = Received(second)
    first.start()
    second.start()
    peer = first.peer(second)
    send(first, peer, [])
    received.next()
    if first_for(peer.ways, 1_000_000) != "cma":
        pytest.skip("this machine does not let processes read each other's memory")
    monkeypatch.setattr(pull, "pull", fails)
    tensors = [torch.randn(400_000), torch.arange(5), torch.randn(300_000)]
    send(first, peer, tensors)
    check_arrival(received.next(), tensors)
    assert first_for(peer.ways, 1_000_000) != "cma", "it is offered for pulling again"
    wait_until_released(peer)


def test_a_sender_keeps_to_the_limit_of_tensors(pair: list[Member]) -> None:
    first, second = pair
    limited = TensorMessages.__new__(TensorMessages)
    vars(limited).update(vars(first.tensor_messages), _tensor_limit=2)
    to = first.peer(second)
    with pytest.raises(SerializationError, match="this worker sends at most 2"):
        limited.encode(to, Kind.CALL, 0, 7, FRONT, [torch.ones(1) for _ in range(3)])
    assert limited.encode(to, Kind.CALL, 0, 7, FRONT, [torch.ones(1), torch.ones(1)])


def test_a_receiver_refuses_more_tensors_than_its_limit_and_their_sender_lets_go(
    pair: list[Member],
) -> None:
    first, second = pair
    second.tensor_messages._tensor_limit = 2
    received = Received(second)
    for member in pair:
        member.start()
    send(first, first.peer(second), SMALL)  # Connects the workers; arrives in one piece.
    assert "'worker1' accepts at most 2" in str(received.failure())
    large = [torch.ones(1 << 16) for _ in range(3)]
    offered = first.agent.channels.offered_bytes
    send(first, first.peer(second), large)
    assert first.agent.channels.offered_bytes > offered
    error = received.failure()
    assert isinstance(error, SerializationError)
    assert "'worker1' accepts at most 2" in str(error)
    deadline_s = time.monotonic() + LIMIT_S
    while held_counts(first.peer(second).held).message_count:
        assert time.monotonic() < deadline_s, held_counts(first.peer(second).held)
        time.sleep(0.001)
    send(first, first.peer(second), large[:2])
    assert len(received.next().tensors()[0]) == 2
