"""The guarantees of every channel, checked for each one between two processes.

A forked process sends; this one receives. They exchange real frames over a socket pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from tests.thorough import examples
from tests.unit.channel.processes import forked
from torchweft import knobs
from torchweft.channel.buffers import HeldTensors, in_order, prepare, pull_buffers
from torchweft.channel.choice import Channels, choose, describe
from torchweft.channel.cma import Nonce
from torchweft.channel.copying import Copier
from torchweft.channel.memory import BufferPool
from torchweft.channel.shm.kernel import process
from torchweft.channel.shm.pool import Lender, SharedPool
from torchweft.channel.table import FETCHED, ChannelKind, decode_table
from torchweft.wire.frames import FrameParser, encode_frame

MIB = 1 << 20
NEVER = 1 << 60
SIZES = [
    0,
    1,
    63,
    64,
    4095,
    4096,
    (64 << 10) - 1,
    64 << 10,
    (64 << 10) + 1,
    MIB,
    examples(16) * MIB + 3,
]
CYCLE = bytes(range(251))  # a prime number of bytes: no two pages are alike

CMA, SHM = ChannelKind.CMA, ChannelKind.SHM
WAYS: dict[ChannelKind, tuple[int, dict[ChannelKind, int]]] = {
    ChannelKind.INLINE: (NEVER, {}),
    ChannelKind.STREAM: (0, {}),
    CMA: (0, {CMA: 1}),
    SHM: (0, {SHM: 1}),
}
"""Each way's inline limit, and the sizes from which its sender uses other channels."""


def pattern(size_bytes: int, seed: int) -> bytearray:
    return bytearray(CYCLE * (size_bytes // len(CYCLE) + 2))[seed : seed + size_bytes]


def serve(link: socket.socket, channels: Channels) -> None:
    """Runs the sender: answers sizes with a message, then a token with the bytes that it holds."""
    held, copier = HeldTensors(), Copier()
    while sizes := _receive_numbers(link):
        buffers = [memoryview(pattern(size, seed)) for seed, size in enumerate(sizes)]
        prepared = prepare(buffers, channels, held, copier)
        for part in encode_frame(1, 0, 0, prepared.table, prepared.following):
            link.sendall(part)
        del buffers, prepared
        held_before = held.statistics().size_bytes
        [token] = _receive_numbers(link)
        held.release(token)
        _send_numbers(link, [held_before, held.statistics().size_bytes])


class Receiver:
    """The receiver, and what it has learned about the sender."""

    def __init__(self, link: socket.socket, channels: Channels, copier: Copier) -> None:
        self.pool = BufferPool(limit_bytes=64 * MIB)
        self.kinds: list[ChannelKind] = []
        self.held_bytes = self.held_afterwards_bytes = 0
        self._link, self._channels, self._copier = link, channels, copier
        self._parser = FrameParser(self.pool.lease, 128 << 10, MIB, NEVER)

    def ask(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Has the sender send buffers of these sizes; returns them as tensors."""
        _send_numbers(self._link, sizes)
        while not (frames := self._parser.received(self._receive())):
            pass
        following = [memoryview(buffer) for buffer in frames[0].buffers]
        table = decode_table(
            frames[0].control, [buffer.nbytes for buffer in following], limit_bytes=NEVER
        )
        self.kinds = [entry.kind for entry in table.entries]
        fetched = {
            CMA: pull_buffers(table, self._channels, self.pool, self._copier),
            SHM: [self._channels.borrowed().take(entry) for entry in table.of_kind(SHM)],
        }
        _send_numbers(self._link, [table.token])
        self.held_bytes, self.held_afterwards_bytes = _receive_numbers(self._link)
        return [_tensor(buffer) for buffer in in_order(table, following, fetched)]

    def _receive(self) -> int:
        count = self._link.recv_into(self._parser.space()[0])
        assert count, "the sender failed"
        return count


def _tensor(buffer: memoryview) -> torch.Tensor:
    if not buffer.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _send_numbers(link: socket.socket, numbers: Sequence[int]) -> None:
    link.sendall(struct.pack(f"<I{len(numbers)}Q", len(numbers), *numbers))


def _receive_numbers(link: socket.socket) -> tuple[int, ...]:
    head = link.recv(4, socket.MSG_WAITALL)
    if not head:
        return ()
    [count] = struct.unpack("<I", head)
    return struct.unpack(f"<{count}Q", link.recv(8 * count, socket.MSG_WAITALL))


@contextlib.contextmanager
def connected(inline_limit_bytes: int, from_bytes: Mapping[ChannelKind, int]) -> Iterator[Receiver]:
    """Connects this process to a sender that chooses its channels by these limits."""
    nonce = Nonce()  # kept while it may be read
    ours = describe(nonce)
    pool = SharedPool(256 * MIB)
    with (
        knobs.INLINE_LIMIT_BYTES.override(inline_limit_bytes),
        knobs.CMA_FROM_BYTES.override(from_bytes.get(CMA, NEVER)),
        knobs.SHM_FROM_BYTES.override(from_bytes.get(SHM, NEVER)),
    ):
        outgoing = Channels("receiver", ours.facts.pid)
    outgoing.lend_by(Lender(pool, process(os.getpid())))
    outgoing.confirm({"cma": "", "shm": ""})

    def send(link: socket.socket, keep: Nonce = nonce) -> None:
        serve(link, outgoing)

    with forked(send) as (pid, link):
        # The child has this process's nonce at the same address, but its own process id.
        theirs = dataclasses.replace(ours, facts=dataclasses.replace(ours.facts, pid=pid))
        incoming = choose(ours, theirs, "sender")
        if CMA in from_bytes and incoming.verdict()["cma"]:
            pytest.skip(f"no cma here: {incoming.verdict()['cma']}")
        incoming.map_memory(pool.descriptor, pool.area.nonce.hex())
        pool.close()
        copier = Copier()
        try:
            yield Receiver(link, incoming, copier)
        finally:
            copier.close()


@pytest.fixture(scope="module", params=list(WAYS), ids=lambda kind: kind.name.lower())
def kind(request: pytest.FixtureRequest) -> ChannelKind:
    return ChannelKind(request.param)


@pytest.fixture(scope="module")
def receiver(kind: ChannelKind) -> Iterator[Receiver]:
    with connected(*WAYS[kind]) as made:
        yield made


@pytest.mark.keeps("threads")  # the copier's, which the module's receiver closes
@pytest.mark.parametrize("size_bytes", SIZES)
def test_bytes_arrive_intact(receiver: Receiver, kind: ChannelKind, size_bytes: int) -> None:
    receiver.ask([size_bytes])  # Large slabs are made at the second request.
    [tensor] = receiver.ask([size_bytes])
    assert tensor.numpy().tobytes() == pattern(size_bytes, seed=0)
    is_fetched = kind in FETCHED and size_bytes > 0
    assert receiver.kinds == ([kind] if is_fetched else [])


def test_received_memory_is_writable_and_independent(receiver: Receiver) -> None:
    sizes = [200_000, 100, 200_000]
    first = receiver.ask(sizes)
    for tensor in first:
        tensor.fill_(255)
    second = receiver.ask(sizes)
    for seed, (size_bytes, old, new) in enumerate(zip(sizes, first, second, strict=True)):
        assert new.numpy().tobytes() == pattern(size_bytes, seed)
        assert old.min().item() == 255


def test_buffers_keep_their_order(receiver: Receiver) -> None:
    sizes = [3, 70_000, 0, 1, MIB, 64, 0]
    tensors = receiver.ask(sizes)
    for seed, (size_bytes, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.numpy().tobytes() == pattern(size_bytes, seed)


def test_leased_memory_comes_back_with_the_tensor(receiver: Receiver, kind: ChannelKind) -> None:
    tensors = receiver.ask([300_000, 300_000])
    assert receiver.pool.statistics().leased_count == (0 if kind == SHM else 2)
    del tensors
    assert receiver.pool.statistics().leased_count == 0


def test_the_sender_lets_go_once_everything_was_pulled(
    receiver: Receiver, kind: ChannelKind
) -> None:
    receiver.ask([100_000, 0, 200_000])
    assert receiver.held_bytes == (300_000 if kind == ChannelKind.CMA else 0)
    assert receiver.held_afterwards_bytes == 0


def test_one_message_may_take_every_way() -> None:
    sizes = [10, 2 * MIB, 100_000, 0, 200_000, 2 * MIB, 64 << 10]
    with connected(64 << 10, {SHM: 150_000, CMA: MIB}) as receiver:
        tensors = receiver.ask(sizes)
        inline, stream = ChannelKind.INLINE, ChannelKind.STREAM
        # A large slab is made only when its size is requested again.
        assert receiver.kinds == [inline, CMA, stream, inline, SHM, SHM, inline]
        for seed, (size_bytes, tensor) in enumerate(zip(sizes, tensors, strict=True)):
            assert tensor.numpy().tobytes() == pattern(size_bytes, seed)
