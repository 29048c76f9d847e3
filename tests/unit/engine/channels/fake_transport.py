"""Ends of transports, as of ``torch.distributed._transport``, within one process."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
from torch import Tensor

from torchweft.engine.channels.rdma import TransportFailed


class FakeRemoteBuffer:
    def __init__(self, owner: str, key: int, length: int) -> None:
        self.owner, self.key, self.length = owner, key, length

    def serialize(self) -> bytes:
        # As long as those of the real backend.
        return json.dumps([self.owner, self.key, self.length, "x" * 800]).encode()

    @classmethod
    def deserialize(cls, data: bytes) -> FakeRemoteBuffer:
        assert type(data) is bytes
        owner, key, length, _ = json.loads(data)
        return cls(owner, key, length)


class FakeView:
    def __init__(self, memory: FakeMemory, offset: int, length: int) -> None:
        self.memory, self.offset, self.length = memory, offset, length

    def size(self) -> int:
        return self.length


class FakeMemory:
    def __init__(self, transport: FakeTransport, key: int, tensor: Tensor) -> None:
        self.transport, self.key, self.tensor = transport, key, tensor

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> FakeView:
        offset = offset or 0
        length = self.tensor.numel() - offset if length is None else length
        assert 0 <= offset <= offset + length <= self.tensor.numel()
        return FakeView(self, offset, length)

    def to_remote_buffer(self, *, timeout: float | None = None) -> FakeRemoteBuffer:
        return FakeRemoteBuffer(self.transport.name, self.key, self.tensor.numel())


class FakeWork:
    """A transfer, which the network ends."""

    def __init__(self, view: FakeView, source: Tensor, network: FakeNetwork) -> None:
        self.view, self.source, self.network = view, source, network
        self.is_done = False
        self.error: Exception | None = None

    def end(self) -> None:
        """Writes the memory, which must still be registered."""
        memory = self.view.memory
        assert memory.transport.memories[memory.key] is memory, "written after it was released"
        if self.network.fails:
            self.error = RuntimeError("the cable is out")
        else:
            start = self.view.offset
            memory.tensor[start : start + self.view.length] = self.source
            if self.network.corrupts:
                memory.tensor[start + self.view.length - 1] ^= 1
            self.network.reads += 1
        self.is_done = True

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert self.is_done, "Weft looks, and does not wait"
        if self.error is not None:
            raise self.error
        return True


class FakeTransport:
    def __init__(self, network: FakeNetwork, name: str) -> None:
        self.network, self.name = network, name
        self.peer = ""
        self.memories: dict[int, FakeMemory] = {}
        self.pending: list[FakeWork] = []
        self.is_closed = False

    def _call(self, action: str) -> None:
        assert not self.is_closed
        if action in self.network.refuses:
            raise RuntimeError(f"cannot {action}")

    def bind(self, *, timeout: float | None = None) -> bytes:
        self._call("bind")
        return self.name.encode()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        self._call("connect")
        assert not self.peer
        self.peer = peer_url.decode()
        assert self.peer in self.network.transports
        return 0

    def register_memory(self, tensor: Tensor, *, timeout: float | None = None) -> FakeMemory:
        self._call("register")
        assert tensor.is_contiguous()
        self.network.last_key += 1
        memory = FakeMemory(self, self.network.last_key, tensor)
        self.memories[memory.key] = memory
        return memory

    def unregister_memory(self, memory: FakeMemory, *, timeout: float | None = None) -> None:
        self._call("unregister")
        assert memory.key in self.memories
        assert all(work.is_done for work in self.pending if work.view.memory is memory)
        del self.memories[memory.key]

    def read(
        self,
        local_buffer: FakeView,
        remote_buffer: FakeRemoteBuffer,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> FakeWork:
        self._call("read")
        assert async_op
        assert local_buffer.memory.transport is self
        assert remote_buffer.owner == self.peer
        if local_buffer.size() > remote_buffer.length:
            raise ValueError("local view does not fit in the remote buffer")
        source = self.network.transports[self.peer].memories[remote_buffer.key].tensor
        work = FakeWork(local_buffer, source[: local_buffer.size()], self.network)
        self.pending.append(work)
        if not self.network.stalls:
            work.end()
        return work

    def close(self, *, timeout: float | None = None) -> None:
        if any(not work.is_done for work in self.pending):
            raise TimeoutError("transfers are pending")
        self.memories.clear()
        self.is_closed = True


class FakeNetwork:
    """Makes transports, and has them fail.

    Attributes:
        refuses: The calls that raise: ``open``, ``bind``, ``connect``, ``register``, ``read``.
        stalls: Whether transfers do not end before ``end_all``.
        fails: Whether transfers end with an error.
        corrupts: Whether transfers write a wrong byte.
        reads: The transfers that have ended well.
    """

    def __init__(self) -> None:
        self.transports: dict[str, FakeTransport] = {}
        self.refuses: set[str] = set()
        self.stalls = self.fails = self.corrupts = False
        self.reads = self.last_key = 0

    def open_transport(self) -> FakeTransport:
        if "open" in self.refuses:
            raise TransportFailed("cannot open")
        name = f"end{len(self.transports)}"
        made = self.transports[name] = FakeTransport(self, name)
        return made

    def end_all(self) -> None:
        """Ends the transfers that are under way."""
        for transport in self.transports.values():
            for work in transport.pending:
                if not work.is_done:
                    work.end()

    @property
    def registered(self) -> int:
        return sum(len(transport.memories) for transport in self.transports.values())

    @property
    def open_count(self) -> int:
        return sum(not transport.is_closed for transport in self.transports.values())


def random_bytes(size_bytes: int) -> memoryview:
    """Returns memory with random contents."""
    return memoryview(torch.randint(0, 256, (size_bytes,), dtype=torch.uint8).numpy().data)
