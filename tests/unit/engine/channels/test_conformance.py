"""The guarantees of every channel, checked for each one between two workers.

``tests/processes/test_channels.py`` checks the channels of one host between processes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.memory_counts import held_counts
from tests.unit.engine.channels.fake_driver import FakeDriver
from tests.unit.engine.channels.fake_transport import FakeNetwork
from tests.unit.engine.worker.group import FRONT, Member, Received, group_of, wait_until
from torchweft import knobs
from torchweft.engine.channels import cuda, rdma
from torchweft.engine.channels.channel import UNTRIED, CannotGet, Channel, Entry, NotInTime
from torchweft.engine.channels.channels import CHANNELS
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import tensor_messages
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ProtocolError, WeftError

KIB, MIB, NEVER = 1 << 10, 1 << 20, 1 << 60
FROM = 70 * KIB
"""Size from which the channel that is tested takes buffers; smaller ones follow their message."""
SIZES = [0, 1, 4096, FROM - 1, FROM, FROM + 1, MIB, 4 * MIB + 3]
KNOBS: dict[str, Any] = {
    "shm": knobs.SHM_FROM_BYTES,
    "cma": knobs.CMA_FROM_BYTES,
    "rdma": knobs.RDMA_FROM_BYTES,
    "striped": knobs.STRIPED_FROM_BYTES,
}


class Pair:
    """Two workers that send tensors to each other over one channel.

    Args:
        channel: Its name.
        members: The workers.
        driver: Makes tensors of devices; None for those of the host.
    """

    def __init__(self, channel: str, members: list[Member], driver: FakeDriver | None) -> None:
        self.channel = channel
        self.first, self.second = members
        self.driver = driver
        self.received = Received(self.second)
        self.peer: Peer = self.first.peer(self.second)
        self.first.agent.connect(self.peer)
        wait_until(lambda: any(each.name == channel for each in self.peer.ways.usable))

    def tensor(self, size_bytes: int, seed: int = 0) -> Tensor:
        made = (torch.arange(size_bytes, dtype=torch.int64) + seed).remainder_(251)
        bytes_ = made.to(torch.uint8)
        return bytes_ if self.driver is None or not size_bytes else self.driver.allocate(bytes_)

    def send(self, tensors: Sequence[Tensor]) -> None:
        messages = self.first.tensor_messages
        frame = messages.encode(self.peer, Kind.CALL, 0, 7, FRONT, tensors)
        self.first.agent.sender.send(self.peer, frame)

    def bring(self, *tensors: Tensor) -> list[Tensor]:
        """Sends tensors; returns those that arrive."""
        self.send(tensors)
        return self.received.next().tensors()[0]

    def warm_up(self, size_bytes: int) -> None:
        """Sends tensors of a size until the channel takes them: after a trial, or once more."""
        before = self.moved()
        for _ in range(200):
            self.bring(self.tensor(size_bytes))
            if self.moved() > before:
                return
            wait_until(lambda: UNTRIED not in self.peer.ways.obstacles().values())
        raise AssertionError(f"{self.channel} takes nothing")

    def moved(self) -> int:
        return self.peer.moved[f"sent {self.channel}"]

    def is_free(self) -> bool:
        gc.collect()
        return not held_counts(self.peer.held).message_count


@pytest.fixture(params=[channel.name for channel in CHANNELS])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    name, driver = str(request.param), None
    over = "tcp" if name == "rdma" else "unix"
    with contextlib.ExitStack() as stack:
        for other, knob in KNOBS.items():
            stack.enter_context(knob.override(FROM if other == name else NEVER))
        if name == "rdma":
            network = FakeNetwork()
            monkeypatch.setattr(rdma, "open_transport", network.open_transport)
            monkeypatch.setattr(rdma, "own_obstacle", lambda: "")
            monkeypatch.setattr(rdma, "is_forced", lambda: True)
        if name == "cuda_ipc":
            driver = device_of_the_host(monkeypatch)
            stack.enter_context(knobs.SMALL_ON_DEVICE_BYTES.override(0))
        members = stack.enter_context(group_of(2, over=over))
        for member in members:
            member.start()
        made = Pair(name, members, driver)
        if name == "cma" and made.first.peer(made.second).ways.obstacles()["cma"]:
            pytest.skip("this machine does not let processes read each other's memory")
        yield made


def device_of_the_host(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Makes all workers find one device, in the host's memory, for all tensors that arrive."""
    driver = FakeDriver()
    monkeypatch.setattr(cuda, "find_driver", lambda: driver)
    monkeypatch.setattr(cuda.CudaIpc, "accept", lambda self, peer, meeting: "")
    monkeypatch.setattr(tensor_messages, "_IS_ON_HOST", driver.is_on_host)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(
        tensor_messages, "devices_of", lambda table, worker="": dict.fromkeys(range(100), device)
    )
    return driver


@pytest.mark.parametrize("size_bytes", SIZES)
def test_bytes_arrive_intact(pair: Pair, size_bytes: int) -> None:
    if size_bytes >= FROM:
        pair.warm_up(size_bytes)
    before, sent = pair.moved(), pair.tensor(size_bytes)
    [arrived] = pair.bring(sent)
    assert torch.equal(arrived, sent)
    takes_all = pair.driver is not None and size_bytes > 0
    is_taken = size_bytes >= FROM or takes_all
    assert pair.moved() - before == (size_bytes if is_taken else 0)


def test_received_memory_is_writable_and_independent(pair: Pair) -> None:
    pair.warm_up(MIB)
    sent = [pair.tensor(MIB, 1), pair.tensor(100, 2), pair.tensor(MIB, 3)]
    copies = [tensor.clone() for tensor in sent]
    first = pair.bring(*sent)
    for tensor in first:
        tensor.fill_(255)
    assert all(torch.equal(*both) for both in zip(sent, copies, strict=True))
    second = pair.bring(*sent)
    assert all(torch.equal(*both) for both in zip(second, copies, strict=True))
    assert all(tensor.min() == 255 for tensor in first)


def test_the_sender_lets_go_once_the_buffers_were_read(pair: Pair) -> None:
    pair.warm_up(MIB)
    for _ in range(3):
        pair.bring(pair.tensor(MIB), pair.tensor(FROM))
    wait_until(pair.is_free)


def test_the_sender_lets_go_of_buffers_that_nobody_reads(pair: Pair) -> None:
    pair.warm_up(MIB)
    unread = Received(pair.second, fetches=False)
    for _ in range(3):
        pair.send([pair.tensor(MIB), pair.tensor(FROM)])
        unread.next()
    wait_until(pair.is_free)
    pair.received = Received(pair.second)
    sent = pair.tensor(MIB)
    assert torch.equal(pair.bring(sent)[0], sent)


def test_a_message_that_cannot_be_sent_leaves_nothing(pair: Pair) -> None:
    pair.warm_up(MIB)
    messages, unsendable = pair.first.tensor_messages, -1
    for _ in range(3):
        with pytest.raises(Exception, match=r"out of range|requires 0 <= number"):
            messages.encode(pair.peer, Kind.CALL, 0, unsendable, FRONT, [pair.tensor(MIB)])
    assert pair.is_free()


def of_second(pair: Pair) -> Channel:
    [found] = [each for each in pair.second.agent.channels.all if each.name == pair.channel]
    return found


def test_what_does_not_arrive_follows_behind_the_message_and_the_channel_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not of_second(pair).is_held:
        pytest.skip("its buffers come back otherwise, and what is mapped cannot fail")
    pair.warm_up(MIB)

    def fail(*arguments: object) -> list[object]:
        raise CannotGet("the way is closed")

    monkeypatch.setattr(of_second(pair), "get", fail)
    sent = [pair.tensor(MIB, 1), pair.tensor(10, 2), pair.tensor(FROM, 3)]
    for _ in range(2):
        arrived = pair.bring(*sent)
        assert all(torch.equal(*both) for both in zip(arrived, sent, strict=True))
    assert "cannot get" in pair.peer.ways.obstacles()[pair.channel]
    assert caplog.text.count("no longer travel by") == 1
    wait_until(pair.is_free)


def test_what_is_late_follows_and_the_channel_stays(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not of_second(pair).is_held:
        pytest.skip("its buffers come back otherwise, and what is mapped cannot fail")
    pair.warm_up(MIB)

    def fail(*arguments: object) -> list[object]:
        raise NotInTime("it is late")

    with monkeypatch.context() as failing:
        failing.setattr(of_second(pair), "get", fail)
        sent = pair.tensor(MIB)
        assert torch.equal(pair.bring(sent)[0], sent)
    assert not pair.peer.ways.obstacles()[pair.channel]
    assert torch.equal(pair.bring(sent)[0], sent)


@pytest.mark.parametrize("content", [b"", b"x", bytes(200)])
def test_impossible_handles_are_refused(pair: Pair, content: bytes) -> None:
    pair.warm_up(MIB)
    channel, peer = of_second(pair), pair.second.peer(pair.first)
    entry = Entry(channel.number, MIB, content, torch.device("cuda", 0))
    with pytest.raises(WeftError):
        channel.get(peer, 1 << 50, [entry])
    with contextlib.suppress(ProtocolError):
        channel.drop(peer, 1 << 50, [entry])
    sent = pair.tensor(MIB)
    assert torch.equal(pair.bring(sent)[0], sent)


def test_the_loss_of_the_peer_frees_what_is_held(pair: Pair) -> None:
    pair.warm_up(MIB)
    ignored = []
    pair.second.agent.receiver.on(
        Kind.CALL, lambda peer, frame: ignored.append(frame), inline=False
    )
    pair.send([pair.tensor(MIB)])
    wait_until(lambda: ignored)
    pair.first.agent.lose(pair.peer, "a test")
    wait_until(pair.is_free)


def test_one_message_may_take_several_channels() -> None:
    with contextlib.ExitStack() as stack:
        for name, from_bytes in (("shm", 200 * KIB), ("cma", MIB), ("rdma", NEVER)):
            stack.enter_context(KNOBS[name].override(from_bytes))
        stack.enter_context(knobs.SHM_LIMIT_BYTES.override(4 * MIB))
        members = stack.enter_context(group_of(2))
        for member in members:
            member.start()
        pair = Pair("shm", members, None)
        sizes = [10, 8 * MIB, 100 * KIB, 0, 200 * KIB, 300 * KIB]
        sent = [pair.tensor(size, seed) for seed, size in enumerate(sizes)]
        arrived = pair.bring(*sent)
        assert all(torch.equal(*both) for both in zip(arrived, sent, strict=True))
        moved = pair.peer.moved
        assert moved["sent shm"] == 500 * KIB
        assert moved["sent cma"] + moved["sent striped"] == 8 * MIB
