"""Tensors between workers by RDMA, over transports within this process."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.memory_counts import held_counts
from tests.unit.engine.channels.fake_transport import FakeNetwork
from tests.unit.engine.worker.group import FRONT, Member, Received, group_of, wait_until
from torchweft import knobs
from torchweft.engine.channels import rdma
from torchweft.engine.channels.channel import UNTRIED
from torchweft.engine.channels.rdma import Rdma
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.tensor_messages import TensorMessage
from torchweft.errors import ProtocolError, WorkerLost

FROM_BYTES = 200_000
TRIAL_READS = rdma._TRIAL_READS


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNetwork]:
    fake = FakeNetwork()
    monkeypatch.setattr(rdma, "open_transport", fake.open_transport)
    monkeypatch.setattr(rdma, "own_obstacle", lambda: "")
    monkeypatch.setattr(rdma, "is_forced", lambda: True)
    yield fake
    assert not rdma._unclosed
    assert not fake.open_count


@pytest.fixture
def pair(network: FakeNetwork) -> Iterator[list[Member]]:
    with (
        knobs.RDMA_FROM_BYTES.override(FROM_BYTES),
        knobs.CMA_FROM_BYTES.override(1 << 40),
        knobs.POOL_IDLE_S.override(0.2),
        group_of(2, over="tcp") as members,
    ):
        for member in members:
            member.start()
        yield members


@pytest.fixture
def received(pair: list[Member]) -> Received:
    return Received(pair[1])


def peer_of(pair: list[Member]) -> Peer:
    return pair[0].peer(pair[1])


def obstacle(pair: list[Member]) -> str:
    return peer_of(pair).ways.obstacles()["rdma"]


def send(pair: list[Member], tensors: list[Tensor]) -> None:
    peer = peer_of(pair)
    pair[0].agent.connect(peer)
    wait_until(lambda: "confirmed" not in obstacle(pair))
    frame = pair[0].tensor_messages.encode(peer, Kind.CALL, 0, 7, FRONT, tensors)
    pair[0].agent.sender.send(peer, frame)


def check(message: TensorMessage, tensors: list[Tensor]) -> None:
    for got, sent in zip(message.tensors()[0], tensors, strict=True):
        assert torch.equal(got, sent)
        assert got.data_ptr() != sent.data_ptr()


def exchange(pair: list[Member], received: Received, *tensors: Tensor) -> None:
    send(pair, list(tensors))
    check(received.next(), list(tensors))


def large() -> Tensor:
    return torch.randn(60_000)


def held(pair: list[Member]) -> int:
    return held_counts(peer_of(pair).held).message_count


@pytest.fixture
def proven(network: FakeNetwork, pair: list[Member], received: Received) -> list[Member]:
    """The pair after a trial."""
    exchange(pair, received, large())
    wait_until(lambda: not obstacle(pair))
    network.reads = 0
    return pair


def sending_way(pair: list[Member]) -> rdma.Way:
    way = pair[0].agent.channels.of(Rdma)._sending[peer_of(pair).id]
    assert way is not None
    return way


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_the_first_large_tensor_goes_another_way_and_begins_a_trial(
    network: FakeNetwork, pair: list[Member], received: Received
) -> None:
    exchange(pair, received, torch.randn(10_000))
    assert obstacle(pair) == UNTRIED
    assert not network.transports
    exchange(pair, received, large())
    wait_until(lambda: not obstacle(pair))
    assert network.reads == TRIAL_READS
    assert len(network.transports) == 2


def test_a_worker_without_it_opens_nothing_when_a_peer_asks(
    network: FakeNetwork, pair: list[Member]
) -> None:
    channel = pair[1].agent.channels.of(Rdma)
    channel._own_obstacle = "no device"
    asking = pair[1].peer(pair[0])
    with pytest.raises(rdma.TransportFailed, match="no device"):
        channel._answer(asking, b"url")
    with pytest.raises(rdma.TransportFailed, match="no device"):
        channel._offer(asking, b"")
    assert not network.transports


@pytest.mark.parametrize("action", ["open", "bind", "connect", "register"])
def test_a_backend_that_does_not_work_is_given_up_once(
    network: FakeNetwork,
    pair: list[Member],
    received: Received,
    caplog: pytest.LogCaptureFixture,
    action: str,
) -> None:
    network.refuses.add(action)
    exchange(pair, received, large())
    wait_until(lambda: action in obstacle(pair))
    exchange(pair, received, large())
    wait_until(lambda: warnings_in(caplog))
    [warning] = warnings_in(caplog)
    assert "no longer travel by rdma, but by cma or striped" in warning
    assert not network.reads


def test_a_trial_with_wrong_bytes_gives_the_channel_up(
    network: FakeNetwork, pair: list[Member], received: Received
) -> None:
    network.corrupts = True
    exchange(pair, received, large())
    wait_until(lambda: "read other bytes" in obstacle(pair))
    exchange(pair, received, large())
    assert network.reads == TRIAL_READS


def test_a_trial_that_is_slower_than_sockets_gives_the_channel_up(
    network: FakeNetwork, pair: list[Member], received: Received
) -> None:
    pair[1].agent.channels.of(Rdma)._least_rate = 1e15
    exchange(pair, received, large())
    wait_until(lambda: "GB/s, which sockets reach as well" in obstacle(pair))
    exchange(pair, received, large())
    assert network.reads == TRIAL_READS


def test_a_trial_without_a_result_gives_the_channel_up(
    network: FakeNetwork, pair: list[Member], received: Received
) -> None:
    pair[1].agent.channels.of(Rdma)._trial_s = 0.1
    network.stalls = True
    exchange(pair, received, large())
    wait_until(lambda: "not there after" in obstacle(pair))
    network.stalls = False
    network.end_all()
    exchange(pair, received, large())
    wait_until(lambda: not pair[1].agent.reactor.busy)
    assert "not there after" in obstacle(pair)  # It comes too late.


def test_a_read_that_takes_too_long_is_asked_for_and_its_slabs_are_not_used_again(
    network: FakeNetwork, proven: list[Member], received: Received
) -> None:
    proven[1].agent.channels.of(Rdma)._stall_s = 0.05
    network.stalls = True
    tensor = large()
    send(proven, [tensor])
    message = received.next()
    check(message, [tensor])
    # The fake transport checks that the memory is still registered when the transfer ends.
    network.end_all()
    assert network.reads == 1
    check(message, [tensor])
    network.stalls = False
    exchange(proven, received, large())
    assert network.reads == 1
    assert len(sending_way(proven).kept) == 1


def test_messages_under_way_when_the_channel_is_given_up_arrive(
    network: FakeNetwork, proven: list[Member]
) -> None:
    proven[1].agent.channels.of(Rdma)._stall_s = 0.05
    network.stalls = True
    tensors = [large() for _ in range(4)]
    got: dict[float, Tensor] = {}

    def on_call(peer: Peer, frame: Frame) -> None:
        message = proven[1].tensor_messages.read(frame)
        proven[1].tensor_messages.fetch(peer, message)
        [tensor] = message.tensors()[0]
        got[float(tensor[0])] = tensor

    proven[1].agent.receiver.on(Kind.CALL, on_call, inline=False)
    for tensor in tensors:
        send(proven, [tensor])
    wait_until(lambda: len(got) == 4)
    assert all(torch.equal(got[float(tensor[0])], tensor) for tensor in tensors)
    network.end_all()


def test_a_sender_that_is_lost_meanwhile_is_named(
    network: FakeNetwork, proven: list[Member], received: Received
) -> None:
    network.stalls = True
    send(proven, [large()])
    assert received.begun.wait(20)
    wait_until(lambda: any(not w.is_done for t in network.transports.values() for w in t.pending))
    proven[1].agent.lose(proven[1].peer(proven[0]), "it was killed")
    error = received.failure()
    assert isinstance(error, WorkerLost)
    assert "it was killed" in str(error)
    # The memory of the transfer lives until that ends.
    wait_until(lambda: rdma._unclosed)
    network.end_all()
    [unclosed] = rdma._unclosed
    rdma._unclosed.clear()
    unclosed._transport.close()


def test_without_room_for_slabs_tensors_take_the_next_channel(
    network: FakeNetwork, proven: list[Member], received: Received
) -> None:
    remote = proven[0].agent.channels.of(Rdma)
    remote._budget._limit_bytes = 2 * 240_000
    exchange(proven, received, torch.randn(1_000_000))
    assert not network.reads
    exchange(proven, received, *[large() for _ in range(4)])
    assert network.reads == 2
    assert not obstacle(proven)


class Lying(struct.Struct):
    """Tells another size than a slab has."""

    def pack(self, _: int) -> bytes:  # type: ignore[override]
        return super().pack(1000)


def test_a_slab_that_is_too_small_is_refused(
    network: FakeNetwork, proven: list[Member], received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until(lambda: not held(proven))
    with monkeypatch.context() as lying:
        lying.setattr(rdma, "SLAB", Lying(rdma.SLAB.format))
        send(proven, [large()])
    error = received.failure()
    assert isinstance(error, ProtocolError)
    assert "which has 1000" in str(error)
    wait_until(lambda: not held(proven))


def test_slabs_without_a_trial_are_refused(
    network: FakeNetwork, proven: list[Member], received: Received
) -> None:
    receiving = proven[1].agent.channels.of(Rdma)._receiving
    way = receiving.pop(proven[1].peer(proven[0]).id)
    assert way is not None
    send(proven, [large()])
    assert "without a trial" in str(received.failure())
    way.close(1.0)


def test_without_memory_for_slabs_tensors_take_the_next_channel(
    network: FakeNetwork, proven: list[Member], received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(size_bytes: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(sending_way(proven).pool, "lease", fail)
    exchange(proven, received, torch.randn(200_000))
    assert not network.reads
    assert not obstacle(proven)


def test_a_loss_during_a_trial_ends_it(
    network: FakeNetwork, pair: list[Member], received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    network.stalls = True
    exchange(pair, received, large())
    wait_until(lambda: any(transport.pending for transport in network.transports.values()))
    pair[1].agent.lose(pair[1].peer(pair[0]), "a test")
    wait_until(lambda: rdma._unclosed)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    network.end_all()
    [unclosed] = rdma._unclosed
    rdma._unclosed.clear()
    unclosed._transport.close()


@pytest.mark.parametrize("side", [0, 1])
def test_the_number_of_transports_is_limited(
    network: FakeNetwork, pair: list[Member], received: Received, side: int
) -> None:
    pair[side].agent.channels.of(Rdma)._way_limit = 0
    exchange(pair, received, large())
    if side:
        wait_until(lambda: "may have no more" in obstacle(pair))
        # The offering side keeps its end until the peer is lost, or it shuts down.
        assert network.open_count == 1
    else:
        assert not network.transports
        assert obstacle(pair) == UNTRIED


with knobs.RDMA.override("1"):
    _obstacle = rdma.own_obstacle()


@pytest.mark.skipif(bool(_obstacle), reason=f"no transport of PyTorch here: {_obstacle}")
def test_tensors_travel_by_the_backend_of_pytorch() -> None:
    with (
        knobs.RDMA.override("1"),
        knobs.CMA_FROM_BYTES.override(1 << 40),
        group_of(2, over="tcp") as pair,
    ):
        for member in pair:
            member.start()
        received = Received(pair[1])
        exchange(pair, received, torch.randn(300_000))
        wait_until(lambda: obstacle(pair) != UNTRIED)
        assert not obstacle(pair)
        for size in (300_000, 1_000_000, 5, 3_000_000):
            exchange(pair, received, torch.randn(size), torch.randn(size), torch.arange(size))
            received.message = None
        wait_until(lambda: not held(pair))
        assert pair[1].peer(pair[0]).moved["received rdma"] == 16 * 4_300_000
