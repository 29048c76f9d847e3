"""Tensors on a device between workers, on devices that are in the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.memory_counts import held_counts
from tests.unit.engine.channels.fake_driver import FakeDriver
from tests.unit.engine.worker.group import FRONT, Member, Received, group_of, wait_until
from torchweft import knobs
from torchweft.engine.channels import cuda
from torchweft.engine.channels.cuda import CudaIpc
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import tensor_messages
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.tensor_messages import TensorMessage
from torchweft.errors import ProtocolError

CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda, "find_driver", lambda: fake)
    monkeypatch.setattr(CudaIpc, "accept", lambda self, peer, meeting: "")
    monkeypatch.setattr(tensor_messages, "_IS_ON_HOST", fake.is_on_host)

    def devices_of(table: object, worker: str = "") -> dict[int, torch.device | None]:
        return dict.fromkeys(range(100), CUDA)

    monkeypatch.setattr(tensor_messages, "devices_of", devices_of)
    return fake


@pytest.fixture
def pair(driver: FakeDriver) -> Iterator[list[Member]]:
    with (
        knobs.POOL_IDLE_S.override(0.2),
        knobs.SMALL_ON_DEVICE_BYTES.override(100),
        group_of(2) as members,
    ):
        for member in members:
            member.start()
        yield members


@pytest.fixture
def received(pair: list[Member]) -> Received:
    return Received(pair[1])


def send(pair: list[Member], tensors: list[Tensor]) -> None:
    first, second = pair
    peer = first.peer(second)
    first.agent.connect(peer)
    wait_until(lambda: uses_devices(peer) or is_given_up(pair))
    frame = first.tensor_messages.encode(peer, Kind.CALL, 0, 7, FRONT, tensors)
    first.agent.sender.send(peer, frame)


def uses_devices(peer: Peer) -> bool:
    return not peer.ways.obstacles().get("cuda_ipc", "not connected")


def is_given_up(pair: list[Member]) -> bool:
    return "cannot get" in pair[0].peer(pair[1]).ways.obstacles()["cuda_ipc"]


def held(pair: list[Member]) -> int:
    return held_counts(pair[0].peer(pair[1]).held).message_count


def check(message: TensorMessage, tensors: list[Tensor]) -> None:
    for got, sent in zip(message.tensors()[0], tensors, strict=True):
        assert torch.equal(got, sent)
        assert got.data_ptr() != sent.data_ptr()


def test_a_range_of_an_allocation_is_copied(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    whole = driver.allocate(torch.randn(1000))
    send(pair, [whole[300:800]])
    check(received.next(), [whole[300:800]])


def test_small_tensors_go_through_the_host_if_their_values_are_there(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    small = driver.allocate(torch.randn(10))
    send(pair, [small])
    assert torch.equal(received.next().tensors()[0][0], small)
    assert not driver.pulls
    driver.is_busy = True
    send(pair, [small])
    driver.is_busy = False
    check(received.next(), [small])
    assert driver.pulls == 1


def test_the_receiver_waits_for_the_work_of_the_sender(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    tensor = driver.allocate(torch.zeros(1000))
    driver.is_busy = True
    send(pair, [tensor])
    moment = threading.Event()
    moment.wait(0.05)
    assert not driver.pulls
    tensor.fill_(7)  # The work ends with this.
    driver.is_busy = False
    check(received.next(), [torch.full((1000,), 7.0)])


def test_memory_that_cannot_be_mapped_comes_through_the_host(
    driver: FakeDriver,
    pair: list[Member],
    received: Received,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver.refuses_to_open = "invalid device context"
    tensor = driver.allocate(torch.randn(1000))
    for _ in range(3):
        send(pair, [tensor])
        assert torch.equal(received.next().tensors()[0][0], tensor)
    assert not driver.pulls
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1  # The channel is given up once.
    assert "no longer travel by cuda_ipc, but by the host's memory" in warnings[0]


def test_memory_that_cannot_be_shared_goes_through_the_host(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    driver.refuses_to_export = True
    tensor = driver.allocate(torch.randn(1000))
    send(pair, [tensor])
    assert torch.equal(received.next().tensors()[0][0], tensor)
    assert not driver.opened


def test_a_receiver_without_memory_fails_and_the_sender_is_told(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    driver.memory_is_short = True
    send(pair, [driver.allocate(torch.randn(1000))])
    error = received.failure()
    assert isinstance(error, torch.OutOfMemoryError)
    wait_until(lambda: not held(pair))


def test_a_range_beyond_the_allocation_is_refused(
    driver: FakeDriver,
    pair: list[Member],
    received: Received,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocation_at = driver.allocation_at

    def lie(address: int) -> tuple[int, int]:
        start, size_bytes = allocation_at(address)
        return start - 8, size_bytes

    monkeypatch.setattr(driver, "allocation_at", lie)
    monkeypatch.setattr(driver, "close", lambda address, device: None)
    monkeypatch.setattr(driver, "open", lambda handle, device: int.from_bytes(handle, "little") + 8)
    send(pair, [driver.allocate(torch.randn(1000))])
    error = received.failure()
    assert isinstance(error, ProtocolError)
    assert "offers 4000 bytes at 8 of an allocation of 4000" in str(error)


def test_freed_memory_is_forgotten(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    exports = pair[0].agent.channels.of(CudaIpc)._exports
    assert exports is not None
    tensor = driver.allocate(torch.randn(1000))
    send(pair, [tensor])
    check(received.next(), [tensor])
    exports.forget_freed()
    assert len(exports._allocations) == 1
    driver.free(tensor)
    wait_until(lambda: not exports._allocations)
    wait_until(lambda: not driver.opened)


def test_few_events_serve_many_messages(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    tensor = driver.allocate(torch.randn(1000))
    exports = pair[0].agent.channels.of(CudaIpc)._exports
    assert exports is not None
    for _ in range(20):
        driver.is_busy = True
        send(pair, [tensor])
        driver.is_busy = False
        check(received.next(), [tensor])
        wait_until(lambda: exports._idle[0])  # a moment after the message is released
    assert len(exports._idle[0]) == 1


def test_without_an_event_the_sender_waits_for_its_own_work(
    driver: FakeDriver, pair: list[Member], received: Received
) -> None:
    tensor = driver.allocate(torch.randn(1000))
    driver.has_no_events = driver.is_busy = True
    send(pair, [tensor])
    assert not driver.is_busy
    check(received.next(), [tensor])
