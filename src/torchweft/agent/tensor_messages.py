"""Messages whose tensors travel by tables and channels.

The layers above give the front of a message and the tensors that were taken out of its value. This
module writes the table of the tensors and chooses a channel for every buffer; the receiver reverses
both. Small tensors stand in the message itself instead; see ``serialize.inline``. A message from a
worker to itself touches neither bytes nor channels: its tensors arrive by reference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchweft import knobs
from torchweft.agent.agent import Agent
from torchweft.agent.data_connections import DataConnections, Range
from torchweft.agent.device_maps import Place
from torchweft.agent.device_memory import device_memory, ready_parts
from torchweft.agent.fetching import Borrowing, Pulling, Source, read_request
from torchweft.agent.peers import Peer
from torchweft.agent.remote_memory import RemoteMemory
from torchweft.channel.buffers import Held, Prepared, in_order, prepare, prepare_offered
from torchweft.channel.copying import Copier
from torchweft.channel.cuda import Offered
from torchweft.channel.shm.borrowed import end_dead_loans
from torchweft.channel.table import (
    CMA,
    CUDA_IPC,
    RDMA,
    SHM,
    STRIPED,
    BufferTable,
    ChannelKind,
    decode_table,
)
from torchweft.errors import ProtocolError
from torchweft.runtime.device_streams import Mark
from torchweft.runtime.reports import log_exception
from torchweft.serialize import tensors as tensor_table
from torchweft.serialize.table import HEADER, SOME_COMPUTED, SOME_ON_DEVICE
from torchweft.wire.frames import Buffer, Frame, encode_frame
from torchweft.wire.messages import (
    TABLES,
    Kind,
    decode_ints,
    decode_tables,
    encode_tables,
)

_IS_ON_HOST = operator.attrgetter("is_cpu")
_CLOSE_LIMIT_S = 5.0


class TensorMessage:
    """The tensors of a message with tables, as received.

    Attributes:
        table: Describes the tensors.
        buffers: The memory of the tensors that has arrived; tensors where it is on a device.
        channel_table: The channels of the missing buffers; empty once all have arrived.
    """

    __slots__ = ("_tensor_limit", "_worker", "buffers", "channel_table", "table")

    def __init__(
        self,
        table: Buffer,
        channel_table: Buffer,
        buffers: Sequence[Buffer],
        worker: str,
        tensor_limit: int,
    ) -> None:
        self.table, self.channel_table = table, channel_table
        self.buffers: Sequence[Buffer | Tensor] = buffers
        self._worker = worker
        self._tensor_limit = tensor_limit

    @property
    def some_are_computed(self) -> bool:
        """Whether some of its tensors have a graph at the sender; valid after ``tensors``."""
        # Inlined: it runs for every message with tables.
        return bool(self.table) and bool(self.table[HEADER.size - 1] & SOME_COMPUTED)

    def flags(self) -> list[int]:
        """Returns the flags of each tensor for the autograd layer."""
        return tensor_table.grad_flags(self.table)

    def tensors(self, *, detached: bool) -> list[Tensor]:
        """Returns the tensors; each owns its memory.

        Args:
            detached: Whether tensors that required grad at the sender are returned without it.
        """
        return tensor_table.rebuild(
            self.table,
            self.buffers,
            detached=detached,
            worker=self._worker,
            limit=self._tensor_limit,
        )


class LocalMessage(NamedTuple):
    """A message from a worker to itself, in place of a frame's control part.

    Attributes:
        head: The head of the message.
        payload: The value without tensors and references.
        tensors: The tensors themselves.
        externals: The other objects that were taken out.
        mark: The end of the GPU work that computes the tensors.
    """

    head: Any
    payload: bytes
    tensors: Sequence[Tensor]
    externals: Sequence[object]
    mark: Mark | None = None


def local_frame(kind: Kind, flags: int, number: int, message: LocalMessage) -> Frame:
    """Returns a message to this worker itself as a frame."""
    return Frame(kind, flags, number, message, ())  # type: ignore[arg-type]


class TensorMessages:
    """Encodes and decodes tensor messages for one worker.

    Attributes:
        sources: The fetcher of each channel whose buffers do not follow the message.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._name = agent.info.name
        self._frame_limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        self._tensor_limit = knobs.TENSOR_LIMIT.get()
        self._copier = Copier(f"weft-{agent.info.name}-copy")
        self._data = DataConnections(agent)
        self._devices = device_memory(agent)
        self._remote = RemoteMemory(agent, self._copier)
        self.sources: dict[ChannelKind, Source] = {
            CMA: Pulling(agent, self._copier),
            SHM: Borrowing(agent),
            STRIPED: self._data,
            RDMA: self._remote,
        }
        self._memory = agent.memory
        self._idle_s = knobs.POOL_IDLE_S.get()
        self._next_trim_s = 0.0
        self.on_offered: Callable[[Peer, Kind, int, Mapping[str, int]], None] | None = None
        """Called for each message some of whose tensors do not go over the link, while traced."""
        agent.timers.add(self.tick)
        agent.receiver.on(Kind.PULLED, self._on_pulled, inline=True)
        agent.receiver.on(Kind.SUPPLY, self._on_supply, inline=True)
        agent.receiver.on(Kind.DEVICE_FREED, self._on_device_freed, inline=True)

    def peer_lost(self, peer: Peer) -> None:
        """Fails the waits for tensors of a lost worker; takes back memory lent to it."""
        self.peer_disconnected(peer)
        peer.held.close()
        peer.channels.lose()
        self._devices.peer_lost(peer)
        self._remote.peer_lost(peer)

    def peer_disconnected(self, peer: Peer) -> None:
        """Fails the waits for tensors of a worker whose connection has ended."""
        self._data.give_up(peer)

    def close(self, limit_s: float = _CLOSE_LIMIT_S) -> None:
        """Sends waiting data, for at most ``limit_s``; ends the threads that move tensors."""
        self._data.close(limit_s)
        self._copier.close()
        self._devices.close()
        self._remote.close()

    def tick(self, now_s: float) -> float:
        """Frees pooled memory that has not been used for a while; a timer job."""
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + self._idle_s / 2
            pool = self._memory.pool
            trims = [self._agent.pool.trim] if pool is None else [self._agent.pool.trim, pool.trim]
            jobs: list[Callable[[], object]] = [partial(trim, self._idle_s) for trim in trims]
            jobs += [peer.channels.tidy for peer in list(self._agent.peers.values())]
            for job in (end_dead_loans, *jobs, self._devices.tick, self._remote.tick):
                try:
                    job()
                except Exception:  # The others are done nevertheless.
                    log_exception("some unused memory could not be freed")
        return self._next_trim_s

    def encode(
        self,
        peer: Peer,
        kind: Kind,
        flags: int,
        number: int,
        front: bytes,
        tensors: Sequence[Tensor],
        place: Place | None = None,
    ) -> list[Buffer]:
        """Returns a message with tables for ``Sender.send``.

        Tensors that will be pulled are kept until the peer has them.

        Args:
            peer: The receiver, another worker.
            kind: The kind of the message.
            flags: Flags of that kind; ``TABLES`` is added.
            number: The call that the message belongs to, or 0.
            front: The message without its tensors.
            tensors: The tensors taken out of the value, in order.
            place: Returns the receiver's device for a tensor's device; None for the same name.
        """
        if len(tensors) > self._tensor_limit:
            raise tensor_table.too_many(len(tensors), self._tensor_limit)
        table, flat = tensor_table.describe(tensors, place)
        buffers: Sequence[Held]
        ready: Iterator[Range] | None = None
        if all(map(_IS_ON_HOST, flat)):
            on_host = [tensor_table.as_memory(tensor) for tensor in flat]
            buffers = on_host
            prepared = prepare(
                on_host, peer.channels, peer.held, self._copier, peer.reach_data, peer.stage
            )
        else:
            buffers, copies = self._devices.prepare(peer, flat)
            prepared = self._prepare(peer, buffers)
            if copies is not None:
                ready = ready_parts(copies, prepared.striped)
        if prepared.table:
            self._note_offered(peer, kind, number, buffers, prepared)
        control = b"".join((front, encode_tables(table, prepared.table)))
        try:
            frame = encode_frame(kind, flags | TABLES, number, control, prepared.following)
        except BaseException:
            prepared.take_back(peer.channels, peer.held)
            raise
        if prepared.striped:
            # Last: no tensor may begin to arrive of a message that cannot be sent after all.
            waits = kind == Kind.REPLY
            self._data.send(peer, prepared.token, prepared.striped, waits=waits, ready=ready)
        return frame

    def _prepare(self, peer: Peer, buffers: Sequence[Held]) -> Prepared:
        """Chooses the channels of a message whose tensors were not all on the host."""
        on_host = [each for each in buffers if isinstance(each, memoryview)]
        channels, held, copier = peer.channels, peer.held, self._copier
        if len(on_host) == len(buffers):
            return prepare(on_host, channels, held, copier, peer.reach_data, peer.stage)
        handles = self._devices.handles(peer, buffers)
        return prepare_offered(buffers, handles, channels, held, copier, peer.reach_data)

    def _note_offered(
        self, peer: Peer, kind: Kind, number: int, buffers: Sequence[Held], prepared: Prepared
    ) -> None:
        if prepared.lent and len(buffers) == 1 and self.on_offered is None:
            size_bytes = prepared.lent[0].size_bytes
            is_shared = bool(prepared.shared_bytes)
            peer.moved["lent" if is_shared else "sent shm"] += size_bytes
            if is_shared:
                self._agent.lent_bytes += size_bytes
            else:
                self._agent.offered_bytes += size_bytes
            return
        offered = sum([each.nbytes for each in buffers])
        if prepared.following:
            offered -= sum([each.nbytes for each in prepared.following])
        offered -= prepared.shared_bytes
        self._agent.offered_bytes += offered
        self._agent.lent_bytes += prepared.shared_bytes
        lent, striped = [each.size_bytes for each in prepared.lent], 0
        if prepared.striped:
            striped = sum([each.nbytes for each in prepared.striped])
        shared = sum(lent) - prepared.shared_bytes
        on_devices = sum([each.nbytes for each in buffers if isinstance(each, Offered)])
        moved = {
            "lent": prepared.shared_bytes,
            "sent shm": shared,
            "sent striped": striped,
            "sent cuda_ipc": on_devices,
            "sent rdma": prepared.staged_bytes,
            "sent cma": offered - shared - striped - on_devices - prepared.staged_bytes,
        }
        counts = peer.moved
        for name, count in moved.items():  # Faster than ``Counter.update``.
            counts[name] += count
        if self.on_offered is not None:
            self.on_offered(peer, kind, number, moved)

    def read(self, frame: Frame) -> TensorMessage:
        """Decodes the tables of a received message, without fetching tensors.

        Raises:
            ProtocolError: The message is malformed.
        """
        table, channel_table = decode_tables(frame.control)
        return TensorMessage(table, channel_table, frame.buffers, self._name, self._tensor_limit)

    def fetch(self, peer: Peer, message: TensorMessage) -> None:
        """Fetches tensors that did not come with the message. May block; not for reading threads.

        Raises:
            ProtocolError: The message is malformed.
            SerializationError: It has more tensors than this worker accepts.
            WorkerLost: The sender was lost before its tensors could be fetched.
        """
        if message.channel_table:
            if len(message.table) > self._tensor_limit * tensor_table.SMALLEST_BYTES:
                self._check_count(peer, message)
            message.buffers = self._fetch(peer, message)
            message.channel_table = b""
        if (
            message.table
            and message.table[HEADER.size - 1] & SOME_ON_DEVICE
            and not all(isinstance(buffer, Tensor) for buffer in message.buffers)
        ):
            devices = tensor_table.devices_of(message.table, self._name)
            message.buffers = self._devices.upload(peer, message.buffers, devices)

    def discard(self, peer: Peer, message: TensorMessage) -> None:
        """Tells the sender to release the tensors of a message that will not be read."""
        if message.channel_table:
            table = self._read_table(message)
            for kind in _fetched_kinds(table):
                if kind == CUDA_IPC:
                    self._devices.drop(peer, table)
                else:
                    self._source(peer, kind).drop(peer, table)

    def _check_count(self, peer: Peer, message: TensorMessage) -> None:
        count = tensor_table.count_of(message.table)
        if count > self._tensor_limit:
            self.discard(peer, message)
            raise tensor_table.too_many(count, self._tensor_limit, self._name)

    def _read_table(self, message: TensorMessage) -> BufferTable:
        sizes = [len(buffer) for buffer in message.buffers]
        return decode_table(message.channel_table, sizes, self._frame_limit_bytes)

    def _fetch(self, peer: Peer, message: TensorMessage) -> Sequence[Buffer | Tensor]:
        table = self._read_table(message)
        if len(table.entries) == 1 and table.entries[0].kind != CUDA_IPC:
            return self._source(peer, table.entries[0].kind).fetch(peer, table)
        kinds = _fetched_kinds(table)
        fetched: dict[ChannelKind, Sequence[Buffer | Tensor]] = {}
        for number, kind in enumerate(kinds):
            try:
                if kind == CUDA_IPC:
                    fetched[kind] = self._fetch_from_devices(peer, message, table)
                else:
                    fetched[kind] = self._source(peer, kind).fetch(peer, table)
            except BaseException:
                for other in kinds[number + 1 :]:
                    self._source(peer, other).drop(peer, table)
                raise
        return in_order(table, message.buffers, fetched)

    def _fetch_from_devices(
        self, peer: Peer, message: TensorMessage, table: BufferTable
    ) -> Sequence[Buffer | Tensor]:
        try:
            devices = tensor_table.devices_of(message.table, self._name)
        except BaseException:
            self._devices.drop(peer, table)
            raise
        wanted = [
            devices.get(place)
            for place, entry in enumerate(table.entries)
            if entry.kind == CUDA_IPC
        ]
        return self._devices.fetch(peer, table, wanted)

    def _on_pulled(self, peer: Peer, frame: Frame) -> None:
        released = peer.held.release(int.from_bytes(frame.control[:8], "little"))
        if released:
            self._devices.released(peer, released)
            self._remote.released(released)

    def _on_device_freed(self, peer: Peer, frame: Frame) -> None:
        # Decoded here, so that a malformed message is a violation; ending a mapping may block.
        self._agent.reactor.submit(self._devices.forget, peer, decode_ints(frame.control))

    def _on_supply(self, peer: Peer, frame: Frame) -> None:
        """Sends, behind a message, buffers that did not reach the peer over their channel.

        Inline: the request must not wait for a free thread.
        """
        token, kind = read_request(frame.control)
        if kind == CUDA_IPC:
            # As a task: the work that makes the values may not be done.
            self._agent.reactor.submit(self._supply_from_devices, peer, (frame.id, token))
            return
        buffers: Sequence[memoryview]
        if kind == STRIPED:
            buffers = self._data.take_kept(peer, token)
        elif kind == RDMA:
            buffers = self._remote.resupply(peer, peer.held.release(token) or ())
        else:
            held = peer.held.release(token) or ()
            buffers = [each for each in held if isinstance(each, memoryview)]
            reason = f"worker {peer.name!r} cannot read this process's memory"
            peer.channels.disable(CMA, reason)
        self._supply(peer, frame.id, buffers)

    def _supply_from_devices(self, peer: Peer, request: tuple[int, int]) -> None:
        number, token = request
        buffers: Sequence[memoryview] = ()
        try:
            buffers = self._devices.resupply(peer, peer.held.release(token) or ())
        finally:
            # Without buffers, the peer raises an error in place of the value.
            self._supply(peer, number, buffers)

    def _supply(self, peer: Peer, number: int, buffers: Sequence[memoryview]) -> None:
        self._agent.sender.post(peer, encode_frame(Kind.REPLY, 0, number, b"", buffers))

    def _source(self, peer: Peer, kind: ChannelKind) -> Source:
        source = self.sources.get(kind)
        if source is None:
            raise ProtocolError(
                f"worker {peer.name!r} sends by {kind.name}, which this worker has not offered"
            )
        return source


def _fetched_kinds(table: BufferTable) -> list[ChannelKind]:
    # SHM cannot fail and comes first: no loan is forgotten when another channel fails.
    present = {entry.kind for entry in table.entries}
    return [kind for kind in (SHM, CUDA_IPC, RDMA, CMA, STRIPED) if kind in present]
