"""The channel ``rdma``: large tensors to workers of other hosts, read out of registered memory.

The sender copies a tensor to a registered slab, and the receiver reads that slab. The first large
tensor to a peer makes both sides open the ends of a transport, and read a slab as a trial. Until
that has passed, and after any failure, tensors take the next channel. See
``docs/protocols/channels.md``.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import time
from collections.abc import Sequence

from torchweft import knobs
from torchweft.channel.channel import CannotGet, Channel, Entry, Handle, Home, Meeting, Peer
from torchweft.channel.rdma_transport import (
    SLAB,
    Budget,
    Endpoint,
    ReceivingSlabs,
    RemoteBuffer,
    SendingSlabs,
    Slab,
    Staged,
    Transfer,
    TransportFailed,
    is_forced,
    open_endpoint,
    own_obstacle,
)
from torchweft.errors import ProtocolError, WeftError
from torchweft.wire.frames import Buffer
from torchweft.wire.messages import Kind

_CLOSE_LIMIT_S = 2.0
_DIGEST_BYTES = 32
_TRIAL_READS = 5

# The steps of the trial, the first byte of a ``REMOTE_MEMORY``.
OFFER, ANSWER, TRIAL, TRIED, REFUSED, ENDED = [bytes((number,)) for number in range(1, 7)]


class _Sending:
    """The way to one peer.

    Attributes:
        begun_s: When its trial began.
        slabs: Its slabs; None until its endpoint is open.
        trial: The digest of what the peer is to read; empty until it is told to.
        staged: The slab of the trial.
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


class _Receiving:
    """The way from one peer.

    Attributes:
        failure: Why it is not used any more.
    """

    def __init__(self, endpoint: Endpoint, slabs: ReceivingSlabs) -> None:
        self.endpoint = endpoint
        self.slabs = slabs
        self.failure = ""
        self._known: dict[int, tuple[int, bytes]] = {}
        self._remotes: dict[int, RemoteBuffer] = {}

    def learn(self, content: bytes) -> int:
        """Returns the number of the slab in a handle; keeps its size and description."""
        if len(content) < SLAB.size:
            raise ProtocolError(f"a handle of a slab has {len(content)} bytes")
        number, size_bytes = SLAB.unpack_from(content)
        if len(content) > SLAB.size:
            self._known.setdefault(number, (size_bytes, content[SLAB.size :]))
        return int(number)

    def read(self, entry: Entry, into: Slab, limit_s: float) -> Transfer:
        """Begins to read a slab of the peer."""
        number = self.learn(entry.content)
        known = self._known.get(number)
        if known is None or known[0] < entry.size_bytes:
            raise ProtocolError(
                f"{entry.size_bytes} bytes are announced in slab {number}, which "
                + ("is not described" if known is None else f"has {known[0]}")
            )
        remote = self._remotes.get(number)
        if remote is None:
            remote = self.endpoint.remote(into.registration, known[1])
            self._remotes[number] = remote
        return self.endpoint.read(into.registration, entry.size_bytes, remote, limit_s)


class Rdma(Channel):
    """Tensors that the receiver reads by RDMA out of copies in registered memory."""

    name, number = "rdma", 6
    is_tried = True

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.from_bytes = knobs.RDMA_FROM_BYTES.get()
        self._own_obstacle = own_obstacle()
        self._budget = Budget(knobs.RDMA_LIMIT_BYTES.get())
        self._way_limit = knobs.RDMA_WAYS.get()
        self._least_rate = 0.0 if is_forced() else knobs.RDMA_LEAST_RATE.get()
        self._trial_s = knobs.RDMA_TRIAL_S.get()
        self._stall_s = knobs.RDMA_STALL_S.get()
        self._lock = threading.RLock()
        self._sending: dict[int, _Sending] = {}
        self._receiving: dict[int, _Receiving] = {}
        self._ending: list[_Sending | _Receiving] = []
        self._is_closed = False
        home.on(Kind.REMOTE_MEMORY, self._on_step)

    def describe(self) -> dict[str, object]:
        return {"obstacle": self._own_obstacle}

    def accept(self, peer: Peer, meeting: Meeting) -> str:
        """Returns why this process cannot read the peer's memory, as far as is known yet."""
        theirs = meeting.text("obstacle")
        if self._own_obstacle:
            return self._own_obstacle
        if theirs:
            return f"of the peer: {theirs}"
        return "the peer is on this host" if meeting.is_one_host and not is_forced() else ""

    # Sending

    def put(self, peer: Peer, token: int, buffers: Sequence[memoryview]) -> Sequence[Handle | None]:
        """Copies large buffers to slabs that a peer can read.

        The first call with one for a peer begins the trial, and does not wait for it.
        """
        if max([buffer.nbytes for buffer in buffers]) < self.from_bytes:
            return ()
        sending = self._sending.get(peer.id)
        if sending is None:
            self._begin(peer)
            return ()
        if not sending.is_proven or sending.slabs is None:
            return ()
        handles: list[Handle | None] = [None] * len(buffers)
        try:
            for position, buffer in enumerate(buffers):
                if buffer.nbytes >= self.from_bytes:
                    handles[position] = sending.slabs.put(buffer, self._home.copier)
        except MemoryError:
            pass
        except TransportFailed as error:
            self._fail_sending(peer, sending, str(error))
        return handles

    def _begin(self, peer: Peer) -> None:
        with self._lock:
            is_late = self._is_closed or peer.is_over or peer.id in self._sending
            if is_late or self._has_no_way_left:
                return
            sending = self._sending[peer.id] = _Sending()
        self._home.reactor.submit(self._offer, peer, sending)

    @property
    def _has_no_way_left(self) -> bool:
        return len(self._sending) + len(self._receiving) >= self._way_limit

    def _offer(self, peer: Peer, sending: _Sending) -> None:
        """Opens this side's end; a task, since a backend may take a second to start."""
        with self._home.reactor.idling():
            try:
                endpoint = open_endpoint()
                slabs = SendingSlabs(endpoint, self._home.pool.lease, self._budget)
                with self._lock:
                    is_late = self._is_closed or self._sending.get(peer.id) is not sending
                    if not is_late:
                        sending.endpoint, sending.slabs = endpoint, slabs
                if is_late:
                    endpoint.close(_CLOSE_LIMIT_S)
                    return
                self._tell(peer, OFFER, endpoint.bind())
            except TransportFailed as error:
                self._fail_sending(peer, sending, str(error))

    def _fail_sending(self, peer: Peer, sending: _Sending, reason: str) -> None:
        with self._lock:
            if sending.failure or self._sending.get(peer.id) is not sending:
                return
            sending.failure = reason
            sending.is_proven = False
        self._home.give_up(peer, self, reason)
        self._tell(peer, ENDED, b"")

    # The trial

    def _tell(self, peer: Peer, step: bytes, content: bytes) -> None:
        self._home.post(peer, Kind.REMOTE_MEMORY, step + content)

    def _on_step(self, peer: Peer, control: Buffer) -> None:
        # As an urgent task: it may block, and all threads for tasks may be busy for long.
        self._home.reactor.submit(self._take_step, peer, bytes(control))

    def _take_step(self, peer: Peer, control: bytes) -> None:
        step, content = control[:1], control[1:]
        with self._home.reactor.idling():
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
        slabs = ReceivingSlabs(endpoint, self._home.pool.lease, self._budget)
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
        entry = Entry(self.number, SLAB.unpack_from(content)[1], content)
        limit_s = min(self._trial_s, self._stall_s)
        durations_s: list[float] = []
        buffers: list[memoryview] = []
        for _ in range(_TRIAL_READS):
            buffers.clear()  # The slab is used again.
            began_s = time.perf_counter()
            buffers = self._read(peer, receiving, [entry], limit_s)
            durations_s.append(time.perf_counter() - began_s)
        rate = entry.size_bytes / min(durations_s)
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
        """Fills a slab with random bytes; returns the handle with which the receiver reads it."""
        content = memoryview(os.urandom(slabs.size_for(1)))
        staged = slabs.put(content, self._home.copier)
        if staged is None:
            raise TransportFailed("the limit of registered memory leaves no room for a trial")
        sending.staged = staged
        sending.trial = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
        return staged.content

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
        self._home.prove(peer, self)

    # Receiving

    def get(self, peer: Peer, token: int, entries: Sequence[Entry]) -> Sequence[memoryview]:
        receiving = self._of(peer)
        for entry in entries:
            receiving.learn(entry.content)
        try:
            return self._read(peer, receiving, entries, self._stall_s)
        except CannotGet as error:
            self._stop_receiving(peer, str(error))
            raise TransportFailed(str(error)) from error

    def drop(self, peer: Peer, token: int, entries: Sequence[Entry]) -> None:
        """Keeps the descriptions of a message nevertheless: the sender takes them as known."""
        receiving = self._receiving.get(peer.id)
        if receiving is not None:
            for entry in entries:
                receiving.learn(entry.content)

    def _of(self, peer: Peer) -> _Receiving:
        receiving = self._receiving.get(peer.id)
        if receiving is None:
            if peer.is_over:
                raise peer.lost_error()
            raise ProtocolError(f"worker {peer.name!r} sends by RDMA without a trial")
        return receiving

    def _read(
        self, peer: Peer, receiving: _Receiving, entries: Sequence[Entry], limit_s: float
    ) -> list[memoryview]:
        if receiving.failure:
            raise TransportFailed(receiving.failure)
        slabs = receiving.slabs
        transfers: list[tuple[Slab, Transfer]] = []
        try:
            for entry in entries:
                slab = slabs.take(entry.size_bytes)
                # If this raises, the slab is not used again: a transfer may have begun.
                transfers.append((slab, receiving.read(entry, slab, limit_s)))
            self._home.wait_for(peer, [transfer for _, transfer in transfers], limit_s)
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

    def tick(self, now_s: float) -> None:
        """Ends registrations of idle memory, and trials that take too long."""
        latest_s = time.monotonic() - self._trial_s
        peers = self._home.peers
        for worker, sending in list(self._sending.items()):
            if not sending.is_proven and not sending.failure and sending.begun_s < latest_s:
                reason = f"a trial had no result within {self._trial_s:.0f} s"
                self._fail_sending(peers[worker], sending, reason)
        for worker, receiving in list(self._receiving.items()):
            try:
                receiving.slabs.trim(self._home.idle_s)
            except TransportFailed as error:
                self._stop_receiving(peers[worker], str(error))

    def lost(self, peer: Peer) -> None:
        """Ends the transports with a lost worker, as a task: that waits for their transfers."""
        with self._lock:
            found = self._sending.pop(peer.id, None), self._receiving.pop(peer.id, None)
            ways = [way for way in found if way is not None]
            self._ending += ways
        if ways:
            self._home.reactor.submit(self._end, ways)

    def close(self, limit_s: float) -> None:
        """Ends all transports: this worker shuts down."""
        with self._lock:
            self._is_closed = True
            ways = [*self._sending.values(), *self._receiving.values(), *self._ending]
            self._sending.clear()
            self._receiving.clear()
        _close(ways, time.monotonic() + _CLOSE_LIMIT_S)

    def _end(self, ways: Sequence[_Sending | _Receiving], _: object) -> None:
        with self._home.reactor.idling():
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
