"""Large tensors to workers of other hosts by RDMA; see ``docs/protocols/channels.md``.

The sender copies a tensor to a registered slab, and the receiver reads that slab. The first large
tensor to a peer makes both sides open the ends of a transport, and read a slab as a trial. Until
that has passed, and after any failure, tensors take the next channel.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from torchweft import knobs
from torchweft.agent.agent import Agent
from torchweft.agent.fetching import Waiting, ask_for_supply
from torchweft.agent.peers import Peer
from torchweft.channel.buffers import Held
from torchweft.channel.copying import Copier
from torchweft.channel.cuda import NotReady
from torchweft.channel.rdma import (
    Endpoint,
    RemoteBuffer,
    Transfer,
    TransportFailed,
    is_forced,
    open_endpoint,
)
from torchweft.channel.slabs import Budget, ReceivingSlabs, SendingSlabs, Slab, Staged
from torchweft.channel.table import RDMA, BufferEntry, BufferTable, SharedHandle
from torchweft.errors import ProtocolError, WeftError
from torchweft.wire.frames import Buffer, Frame, encode_frame
from torchweft.wire.messages import Kind

_CLOSE_LIMIT_S = 2.0
_DIGEST_BYTES = 32
_TRIAL_READS = 5
_SLAB = struct.Struct("<IQ")

# The steps of the trial, the first byte of a ``REMOTE_MEMORY``.
OFFER, ANSWER, TRIAL, TRIED, REFUSED, ENDED = [bytes((number,)) for number in range(1, 7)]


class _Sending:
    """The way to one peer.

    Attributes:
        begun_s: When its trial began.
        slabs: Its slabs; None until its endpoint is open.
        trial: The digest of what the peer is to read; empty until it is told to.
        is_proven: Whether the trial has passed.
        failure: Why it is not used any more.
    """

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.endpoint: Endpoint | None = None
        self.slabs: SendingSlabs | None = None
        self.trial = b""
        self.staged: Staged | None = None
        self.is_proven = False
        self.failure = ""


class _Known(NamedTuple):
    """A slab of a peer."""

    size_bytes: int
    remote: RemoteBuffer


class _Receiving:
    """The way from one peer.

    Attributes:
        failure: Why it is not used any more.
    """

    def __init__(self, endpoint: Endpoint, slabs: ReceivingSlabs) -> None:
        self.endpoint = endpoint
        self.slabs = slabs
        self.failure = ""
        self._known: dict[int, _Known] = {}

    def learn(self, handles: Sequence[SharedHandle], own: Slab) -> None:
        """Keeps the descriptions that came with a message."""
        for number, size_bytes, description in handles:
            if number not in self._known:
                remote = self.endpoint.remote(own.registration, description)
                self._known[number] = _Known(size_bytes, remote)

    def read(self, entry: BufferEntry, into: Slab, limit_s: float) -> Transfer:
        """Begins to read a slab of the peer."""
        known = self._known.get(entry.place)
        if known is None or known.size_bytes < entry.size_bytes:
            raise ProtocolError(
                f"{entry.size_bytes} bytes are announced in slab {entry.place}, which "
                + ("is not described" if known is None else f"has {known.size_bytes}")
            )
        return self.endpoint.read(into.registration, entry.size_bytes, known.remote, limit_s)


class RemoteMemory:
    """The tensors that one worker sends and receives by RDMA. Thread-safe.

    Args:
        agent: The worker's agent.
        copier: Copies to slabs.
    """

    def __init__(self, agent: Agent, copier: Copier) -> None:
        self._agent = agent
        self._copier = copier
        self._budget = Budget(knobs.RDMA_LIMIT_BYTES.get())
        self._way_limit = knobs.RDMA_WAYS.get()
        self._least_rate = 0.0 if is_forced() else knobs.RDMA_LEAST_RATE.get()
        self._trial_s = knobs.RDMA_TRIAL_S.get()
        self._stall_s = knobs.RDMA_STALL_S.get()
        self._idle_s = knobs.POOL_IDLE_S.get()
        self._lock = threading.RLock()
        self._sending: dict[int, _Sending] = {}
        self._receiving: dict[int, _Receiving] = {}
        self._ending: list[_Sending | _Receiving] = []
        self._is_closed = False
        agent.receiver.on(Kind.REMOTE_MEMORY, self._on_step, inline=True)
        agent.members.on_joined(self._join)

    def _join(self, peer: Peer) -> None:
        peer.stage = functools.partial(self.stage, peer)

    # Sending

    def stage(self, peer: Peer, buffer: memoryview) -> Staged | None:
        """Copies a buffer to a slab that a peer can read; returns None if there is no way now.

        The first call for a peer begins the trial, and does not wait for it.
        """
        sending = self._sending.get(peer.id)
        if sending is None:
            self._begin(peer)
            return None
        if not sending.is_proven or sending.slabs is None:
            return None
        try:
            return sending.slabs.put(buffer, self._copier)
        except MemoryError:
            return None
        except TransportFailed as error:
            self._fail_sending(peer, sending, str(error))
            return None

    def released(self, buffers: Sequence[Held]) -> None:
        """Notes that a peer has read the slabs of a message."""
        for each in buffers:
            if isinstance(each, Staged):
                each.acknowledge()

    def resupply(self, peer: Peer, buffers: Sequence[Held]) -> list[memoryview]:
        """Returns the copies in slabs that a peer could not read. The way to it is given up."""
        staged = [each for each in buffers if isinstance(each, Staged)]
        for each in staged:
            each.abandon()
        sending = self._sending.get(peer.id)
        if sending is not None:
            self._fail_sending(peer, sending, f"worker {peer.name!r} could not read a slab")
        return [each.memory for each in staged]

    def _begin(self, peer: Peer) -> None:
        with self._lock:
            is_late = self._is_closed or peer.is_over or peer.id in self._sending
            if is_late or self._has_no_way_left:
                return
            sending = self._sending[peer.id] = _Sending()
        self._agent.reactor.submit(self._offer, peer, sending)

    @property
    def _has_no_way_left(self) -> bool:
        return len(self._sending) + len(self._receiving) >= self._way_limit

    def _offer(self, peer: Peer, sending: _Sending) -> None:
        """Opens this side's end; a task, since a backend may take a second to start."""
        with self._agent.reactor.idling():
            try:
                endpoint = open_endpoint()
                self._keep(peer, sending, endpoint)
                self._tell(peer, OFFER, endpoint.bind())
            except TransportFailed as error:
                self._fail_sending(peer, sending, str(error))

    def _keep(self, peer: Peer, sending: _Sending, endpoint: Endpoint) -> None:
        slabs = SendingSlabs(endpoint, self._agent.pool.lease, self._budget)
        with self._lock:
            is_late = self._is_closed or self._sending.get(peer.id) is not sending
            if not is_late:
                sending.endpoint, sending.slabs = endpoint, slabs
        if is_late:
            endpoint.close(_CLOSE_LIMIT_S)
            raise TransportFailed(f"worker {peer.name!r} is gone")

    def _fail_sending(self, peer: Peer, sending: _Sending, reason: str) -> None:
        with self._lock:
            if sending.failure or self._sending.get(peer.id) is not sending:
                return
            sending.failure = reason
            sending.is_proven = False
        peer.channels.disable(RDMA, reason)
        self._tell(peer, ENDED, b"")

    # The trial

    def _tell(self, peer: Peer, step: bytes, content: bytes) -> None:
        self._agent.sender.post(peer, encode_frame(Kind.REMOTE_MEMORY, 0, 0, step + content))

    def _on_step(self, peer: Peer, frame: Frame) -> None:
        # As an urgent task: it may block, and all threads for tasks may be busy for long.
        self._agent.reactor.submit(self._take_step, peer, bytes(frame.control))

    def _take_step(self, peer: Peer, control: bytes) -> None:
        step, content = control[:1], control[1:]
        with self._agent.reactor.idling():
            if step in (OFFER, TRIAL, ENDED):
                self._on_step_of_sender(peer, step, content)
            else:
                self._on_step_of_receiver(peer, step, content)

    def _on_step_of_sender(self, peer: Peer, step: bytes, content: bytes) -> None:
        """Does the part of the receiver; a failure is told to the sender, which gives up."""
        try:
            if step == OFFER:
                self._tell(peer, ANSWER, self._answer(peer, content))
            elif step == TRIAL:
                self._tell(peer, TRIED, self._try(peer, content))
            else:
                self._stop_receiving(peer, "its sender has given it up")
        except (WeftError, MemoryError, struct.error) as error:
            self._stop_receiving(peer, str(error))
            self._tell(peer, REFUSED, str(error).encode())

    def _answer(self, peer: Peer, url: bytes) -> bytes:
        """Opens this side's end and connects it; returns what the sender connects to."""
        endpoint = open_endpoint()
        slabs = ReceivingSlabs(endpoint, self._agent.pool.lease, self._budget)
        with self._lock:
            is_late = self._is_closed or peer.is_over or peer.id in self._receiving
            is_taken = not is_late and not self._has_no_way_left
            if is_taken:
                self._receiving[peer.id] = _Receiving(endpoint, slabs)
        if not is_taken:
            endpoint.close(_CLOSE_LIMIT_S)
            raise TransportFailed(
                f"it has RDMA with {self._way_limit} workers, and may have no more"
                if not is_late
                else "it has RDMA with this worker already, or shuts down"
            )
        own = endpoint.bind()
        endpoint.connect(url)
        return own

    def _try(self, peer: Peer, content: bytes) -> bytes:
        """Reads the slab of a trial, and measures that; returns the digest of its bytes.

        The best of some reads counts: the first one connects, and others may be interrupted.
        """
        receiving = self._receiving.get(peer.id)
        if receiving is None:
            raise ProtocolError("a trial needs an offer before")
        number, size_bytes = _SLAB.unpack_from(content)
        handle = SharedHandle(number, size_bytes, content[_SLAB.size :])
        entry = BufferEntry(RDMA, size_bytes, number)
        limit_s = min(self._trial_s, self._stall_s)
        durations_s: list[float] = []
        buffers: list[memoryview] = []
        for _ in range(_TRIAL_READS):
            buffers.clear()  # The slab is used again.
            began_s = time.perf_counter()
            buffers = self._read(peer, receiving, [entry], [handle], limit_s)
            durations_s.append(time.perf_counter() - began_s)
        rate = size_bytes / min(durations_s)
        if rate < self._least_rate:
            raise TransportFailed(
                f"a trial ran at {rate / 1e9:.2f} GB/s, which sockets reach as well"
            )
        return hashlib.blake2b(buffers[0], digest_size=_DIGEST_BYTES).digest()

    def _on_step_of_receiver(self, peer: Peer, step: bytes, content: bytes) -> None:
        sending = self._sending.get(peer.id)
        if sending is None or sending.endpoint is None or sending.slabs is None:
            return
        try:
            if step == ANSWER and not sending.trial:
                sending.endpoint.connect(content)
                self._tell(peer, TRIAL, self._trial(sending, sending.slabs))
            elif step == TRIED and sending.trial:
                self._judge(peer, sending, content)
            elif step == REFUSED:
                reason = content.decode(errors="replace")
                raise TransportFailed(f"worker {peer.name!r} cannot: {reason}")
        except (TransportFailed, MemoryError) as error:
            self._fail_sending(peer, sending, str(error))

    def _trial(self, sending: _Sending, slabs: SendingSlabs) -> bytes:
        """Fills a slab with random bytes; returns what the receiver needs to read it."""
        content = memoryview(os.urandom(slabs.size_for(1)))
        staged = slabs.put(content, self._copier)
        if staged is None:
            raise TransportFailed("the limit of registered memory leaves no room for a trial")
        sending.staged = staged
        sending.trial = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
        [handle] = staged.handles
        return _SLAB.pack(handle.number, handle.size_bytes) + handle.content

    def _judge(self, peer: Peer, sending: _Sending, digest: bytes) -> None:
        if digest != sending.trial:
            raise TransportFailed(f"worker {peer.name!r} read other bytes than there were")
        if sending.staged is not None:
            sending.staged.acknowledge()
            sending.staged = None  # The slab comes back.
        with self._lock:
            if sending.failure:
                return
            sending.is_proven = True
        peer.channels.prove(RDMA)

    # Receiving

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        """Reads the buffers of a message that are in slabs. Blocks until they are there.

        Raises:
            ProtocolError: The sender's table is impossible.
            WorkerLost: The sender was lost before its slabs could be read.
            MemoryError: The system has no memory left.
        """
        entries = table.of_kind(RDMA)
        sizes = [entry.size_bytes for entry in entries]
        receiving = self._receiving.get(peer.id)
        try:
            if receiving is None:
                if peer.is_over:
                    raise peer.lost_error()
                raise ProtocolError(f"worker {peer.name!r} sends by RDMA without a trial")
            buffers = self._read(peer, receiving, entries, table.handles, self._stall_s)
        except (TransportFailed, NotReady) as error:
            self._stop_receiving(peer, str(error))
            return ask_for_supply(self._agent, peer, table.token, RDMA, sizes, error)
        except BaseException:
            self.drop(peer, table)
            raise
        self._agent.note_pulled(peer, "rdma", sum(sizes))
        self.drop(peer, table)
        return buffers

    def drop(self, peer: Peer, table: BufferTable) -> None:
        """Tells the sender that its slabs are no longer needed."""
        self._agent.sender.post_ints(peer, Kind.PULLED, table.token)

    def _read(
        self,
        peer: Peer,
        receiving: _Receiving,
        entries: Sequence[BufferEntry],
        handles: Sequence[SharedHandle],
        limit_s: float,
    ) -> list[memoryview]:
        if receiving.failure:
            raise TransportFailed(receiving.failure)
        slabs = receiving.slabs
        transfers: list[tuple[Slab, Transfer]] = []
        try:
            for entry in entries:
                slab = slabs.take(entry.size_bytes)
                receiving.learn(handles, slab)
                # If this raises, the slab is not used again: a transfer may have begun.
                transfers.append((slab, receiving.read(entry, slab, limit_s)))
            with Waiting(self._agent, peer, limit_s) as waiting:
                waiting.for_events([transfer for _, transfer in transfers])
            for _, transfer in transfers:
                transfer.check()
        except BaseException:
            _give_back_ended(slabs, transfers)
            raise
        return [
            slabs.lend(slab, entry.size_bytes)
            for (slab, _), entry in zip(transfers, entries, strict=True)
        ]

    def _stop_receiving(self, peer: Peer, reason: str) -> None:
        receiving = self._receiving.get(peer.id)
        if receiving is not None:
            receiving.failure = receiving.failure or reason

    # Housekeeping

    def tick(self) -> None:
        """Ends registrations of idle memory, and trials that take too long."""
        latest_s = time.monotonic() - self._trial_s
        for worker, sending in list(self._sending.items()):
            if not sending.is_proven and not sending.failure and sending.begun_s < latest_s:
                reason = f"a trial had no result within {self._trial_s:.0f} s"
                self._fail_sending(self._agent.peers[worker], sending, reason)
        for worker, receiving in list(self._receiving.items()):
            try:
                receiving.slabs.trim(self._idle_s)
            except TransportFailed as error:
                self._stop_receiving(self._agent.peers[worker], str(error))

    def peer_lost(self, peer: Peer) -> None:
        """Ends the transports with a lost worker, as a task: that waits for their transfers."""
        with self._lock:
            found = self._sending.pop(peer.id, None), self._receiving.pop(peer.id, None)
            ways = [way for way in found if way is not None]
            self._ending += ways
        if ways:
            self._agent.reactor.submit(self._end, ways)

    def close(self) -> None:
        """Ends all transports: this worker shuts down."""
        with self._lock:
            self._is_closed = True
            ways = [*self._sending.values(), *self._receiving.values(), *self._ending]
            self._sending.clear()
            self._receiving.clear()
        _close(ways, time.monotonic() + _CLOSE_LIMIT_S)

    def _end(self, ways: Sequence[_Sending | _Receiving], _: object) -> None:
        with self._agent.reactor.idling():
            _close(ways, time.monotonic() + _CLOSE_LIMIT_S)
        with self._lock:
            self._ending = [way for way in self._ending if way not in ways]


def _close(ways: Sequence[_Sending | _Receiving], deadline_s: float) -> None:
    for way in ways:
        if way.endpoint is not None:
            way.endpoint.close(max(deadline_s - time.monotonic(), 0.0))
        if way.slabs is not None:
            way.slabs.close()


def _give_back_ended(slabs: ReceivingSlabs, transfers: Sequence[tuple[Slab, Transfer]]) -> None:
    """Takes back the slabs of transfers that have ended; the others are never used again."""
    for slab, transfer in transfers:
        try:
            if transfer.query():
                slabs.give_back(slab)
        except TransportFailed:
            pass  # Unknown whether it has ended.
