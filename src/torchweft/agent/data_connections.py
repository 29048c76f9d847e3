"""Data connections: large tensors between a worker and its peers, beside the control link.

This module dials and accepts the connections, waits for transfers and gives them up;
``torchweft.transport.striped`` moves the bytes. The sender dials when it has the first large tensor
for a peer, and states the purpose in its greeting; the connection runs one way only. The message
goes over the control link at once; its token names the transfers that the receiver waits for.

A broken data connection is not resumed. Its whole set is given up, and the receiver requests the
missing tensors over the control link: see ``docs/protocols/sessions.md``.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchweft import knobs
from torchweft.agent.agent import Agent
from torchweft.agent.fetching import ask_for_supply
from torchweft.agent.peers import Peer
from torchweft.channel.table import STRIPED, BufferTable
from torchweft.errors import NotInitialized, ProtocolError, WeftError
from torchweft.runtime.transfer_loop import READABLE, WRITABLE, TransferLoop
from torchweft.transport.keepalive import keep_alive
from torchweft.transport.striped import (
    Arrivals,
    NotComing,
    Outbox,
    ReceivingConnection,
    SendingConnection,
    TransferKey,
)
from torchweft.wire.frames import Buffer, Frame
from torchweft.wire.messages import Kind, decode_ints

_log = logging.getLogger("torchweft")

Range = tuple[int, int, int]
"""A range of a message's transfers: the number of its buffer, its start and its end in bytes."""

_NO_SET = 0
"""Stands for the number of a set of connections; sets count from 1."""
_DRAIN_LIMIT_S = 5.0
_DRAIN_POLL_S = 0.001
_DIAL_AGAIN_S = 10.0
"""How long tensors follow their messages after a failure to make data connections."""
_SPARE_WAITS = 16
"""How many tasks may wait for tensors without counting as running; each takes a thread."""


class _Sending:
    """A set of connections that this side dialled to send over, until one of them breaks."""

    def __init__(self, number: int, outbox: Outbox) -> None:
        self.number = number
        self.outbox = outbox
        self.connections: list[SendingConnection] = []


class _Receiving(NamedTuple):
    """A connection that the peer sends over, and the number of its set."""

    number: int
    connection: ReceivingConnection


class _PeerData:
    """The data connections with one peer, in both directions."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.dial_lock = threading.Lock()
        self.dial_again_s = 0.0
        self.lock = threading.RLock()
        self.set_count = 0
        self.sending: _Sending | None = None
        # By token: the set that buffers went over, and the buffers; not yet acknowledged.
        self.kept: dict[int, tuple[int, Sequence[memoryview]]] = {}
        self.receiving: list[_Receiving] = []
        self.broken_set = 0
        """The highest number of a broken set of the peer's connections."""
        self.is_closed = False

    def abandon(self) -> None:
        """Frees the descriptors in a forked process; takes no lock."""
        sending = self.sending
        connections = [] if sending is None else list(sending.connections)
        for connection in (*connections, *[each.connection for each in self.receiving]):
            connection.abandon()


class DataConnections:
    """The data connections of one worker. Thread-safe.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._pump = TransferLoop(f"weft-{agent.info.name}-data", knobs.STRIPE_THREADS.get())
        self._stripe_bytes = knobs.STRIPE_BYTES.get()
        self._connection_count = knobs.STRIPE_CONNECTIONS.get()
        self._stall_s = knobs.STRIPE_STALL_S.get()
        self._limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        self._lock = threading.RLock()
        self._spare_waits = threading.Semaphore(_SPARE_WAITS)
        agent.receiver.on(Kind.ARRIVED, self._on_arrived, inline=True)
        agent.receiver.on(Kind.DATA_BROKEN, self._on_data_broken, inline=True)
        agent.receiver.on(Kind.UNSENT, self._on_unsent, inline=True)
        agent.members.on_joined(self._offer)

    def _offer(self, peer: Peer) -> None:
        peer.accept_data = functools.partial(self._accept, peer)
        peer.reach_data = functools.partial(self._reach, peer)

    # Sending

    def _reach(self, peer: Peer) -> bool:
        """Connects to a peer unless that has been done; returns False if it cannot connect.

        Blocks for a limited time.
        """
        data = self._of(peer)
        if data.sending is not None:
            return True
        with data.dial_lock:
            is_early = time.monotonic() < data.dial_again_s
            if data.sending is not None or data.is_closed or peer.dial_data is None or is_early:
                return data.sending is not None
            data.set_count += 1
            try:
                connections = peer.dial_data(self._connection_count, data.set_count)
                self._adopt_sending(peer, data, connections)
            except (ConnectionRefusedError, ProtocolError) as error:
                if not data.is_closed:
                    peer.channels.disable(STRIPED, f"no data connection can be made: {error}")
                return False
            except OSError as error:
                data.dial_again_s = time.monotonic() + _DIAL_AGAIN_S
                _log.info("no data connection to worker %r now: %s", peer.name, error)
                return False
        return True

    def send(
        self,
        peer: Peer,
        token: int,
        buffers: Sequence[memoryview],
        *,
        waits: bool,
        ready: Iterable[Range] | None = None,
    ) -> None:
        """Sends transfers over the current connections; keeps the buffers until they arrived.

        Args:
            peer: The receiver.
            token: Token of the message that the transfers belong to.
            buffers: Contiguous buffers, none of them empty.
            waits: Whether to block under backpressure from the peer. Must be False in a thread that
                others rely on to read a connection.
            ready: All ranges of the buffers, each as soon as it may be sent; None if all may be
                sent now. Is iterated to its end, which blocks as long as it does.
        """
        data = self._of(peer)
        sending = data.sending
        if waits and sending is not None:
            sending.outbox.wait_for_room()
        if ready is not None:
            self._send_as_ready(peer, data, token, buffers, ready)
            return
        started: list[SendingConnection] = []
        with data.lock:
            if data.is_closed:
                return
            sending = data.sending
            data.kept[token] = (_NO_SET if sending is None else sending.number, buffers)
            if sending is not None:
                started = sending.outbox.put(token, buffers)
        if sending is None:
            # Race: the connections broke after this channel was chosen.
            self._agent.sender.post_ints(peer, Kind.UNSENT, _NO_SET, token)
        for connection in started[1:]:
            self._pump.arm(connection.fd, WRITABLE)
        # This thread writes the first share: the transfer threads would have to be woken first.
        for connection in started[:1]:
            self._pump.arm(connection.fd, connection.write())

    def _send_as_ready(
        self,
        peer: Peer,
        data: _PeerData,
        token: int,
        buffers: Sequence[memoryview],
        ready: Iterable[Range],
    ) -> None:
        with data.lock:
            if data.is_closed:
                return
            # Number 0 is that of no set: if this set breaks, the peer must not request buffers that
            # are not filled yet.
            data.kept[token] = (_NO_SET, buffers)
            sending = data.sending
        try:
            for position, start, end in ready:
                if sending is not None:
                    part = sending.outbox.put_part(token, position, buffers[position], start, end)
                    for connection in part:
                        self._pump.arm(connection.fd, WRITABLE)
        except BaseException:
            self.take_kept(peer, token)  # The message will not be sent.
            raise
        with data.lock:
            if token not in data.kept:
                return  # The peer has all, or is lost.
            is_whole = sending is not None and data.sending is sending
            if is_whole:
                assert sending is not None
                data.kept[token] = (sending.number, buffers)
        if not is_whole:
            self._agent.sender.post_ints(peer, Kind.UNSENT, _NO_SET, token)

    def take_kept(self, peer: Peer, token: int) -> Sequence[memoryview]:
        """Removes and returns the kept transfers of a message."""
        data = self._of(peer)
        with data.lock:
            return data.kept.pop(token, (_NO_SET, ()))[1]

    def _on_arrived(self, peer: Peer, frame: Frame) -> None:
        # Dropped outside the lock: the destruction of a tensor may run any code.
        dropped = [self.take_kept(peer, token) for token in decode_ints(frame.control)]
        del dropped

    def _on_data_broken(self, peer: Peer, frame: Frame) -> None:
        for number in decode_ints(frame.control):
            self._break_sending(peer, number, "the peer says that one has ended")

    def _break_sending(self, peer: Peer, number: int, cause: str) -> None:
        """Ends a set with a broken connection; the peer requests the tensors that are missing."""
        data = self._of(peer)
        with data.lock:
            sending = data.sending
            if sending is None or sending.number != number:
                return
            data.sending = None
            unsent = [token for token, (of_set, _) in data.kept.items() if of_set == number]
        _log.info("data connections to worker %r are made again: %s", peer.name, cause)
        self._close_all(sending.connections)
        sending.outbox.close()
        self._agent.sender.post_ints(peer, Kind.UNSENT, number, *unsent)

    # Receiving

    def fetch(self, peer: Peer, table: BufferTable) -> Sequence[Buffer]:
        """Blocks until the transfers of a message are here; returns their memory, in order.

        Raises:
            WorkerLost: The sender was lost before all transfers had arrived.
            ProtocolError: A transfer has another size than the message says.
        """
        arrivals = self._of(peer).arrivals
        sizes = _transfers(table)
        if all(map(arrivals.is_here, sizes)):
            return self._wait(peer, arrivals, sizes)
        reactor = self._agent.reactor
        is_spare = self._spare_waits.acquire(blocking=False)
        is_counted = is_spare and reactor.begin_wait()
        if not is_spare:
            reactor.wake()  # Urgent tasks must not wait for this thread.
        try:
            return self._wait(peer, arrivals, sizes)
        finally:
            if is_counted:
                reactor.end_wait()
            if is_spare:
                self._spare_waits.release()

    def _wait(
        self, peer: Peer, arrivals: Arrivals, sizes: dict[TransferKey, int]
    ) -> Sequence[Buffer]:
        token = next(iter(sizes)).token
        buffers: Sequence[Buffer]
        try:
            buffers = [self._await(peer, arrivals, key, size) for key, size in sizes.items()]
        except NotComing as error:
            return ask_for_supply(self._agent, peer, token, STRIPED, list(sizes.values()), error)
        finally:
            arrivals.forget(sizes)
        self._agent.note_pulled(peer, "striped", sum(sizes.values()))
        self._agent.sender.post_ints(peer, Kind.ARRIVED, token)
        return buffers

    def _await(
        self, peer: Peer, arrivals: Arrivals, key: TransferKey, size_bytes: int
    ) -> memoryview:
        """Waits for one transfer; if no data arrives for long, gives up the peer's connections."""
        while True:
            try:
                return arrivals.wait(key, size_bytes, self._stall_s)
            except TimeoutError as error:
                # A busy peer is not lost: once it receives DATA_BROKEN, it sends again.
                _log.warning(
                    "a tensor of worker %r is late: %s; requesting it again", peer.name, str(error)
                )
                data = self._of(peer)
                with data.lock:
                    numbers = {each.number for each in data.receiving}
                for number in sorted(numbers):
                    self._end_receiving(peer, number)
                    self._agent.sender.post_ints(peer, Kind.DATA_BROKEN, number)

    def drop(self, peer: Peer, table: BufferTable) -> None:
        """Has the transfers of a message dropped on arrival: they will not be fetched."""
        arrivals = self._of(peer).arrivals
        sizes = _transfers(table)
        for key, size_bytes in sizes.items():
            arrivals.discard(key, size_bytes)
        self._agent.sender.post_ints(peer, Kind.ARRIVED, next(iter(sizes)).token)

    def _on_unsent(self, peer: Peer, frame: Frame) -> None:
        number, *tokens = decode_ints(frame.control) or (0,)
        self._end_receiving(peer, number)
        self._of(peer).arrivals.give_up(tokens)

    def _end_receiving(self, peer: Peer, number: int) -> None:
        """Ends the peer's connections of a set, and earlier ones: no data may arrive late."""
        data = self._of(peer)
        with data.lock:
            data.broken_set = max(data.broken_set, number)
            ended = [each for each in data.receiving if each.number <= data.broken_set]
        self._close_all([each.connection for each in ended])
        # Remove them last: a concurrent call must find them, and wait for those being read.
        with data.lock:
            data.receiving = [each for each in data.receiving if each not in ended]

    def _close_all(self, connections: Sequence[SendingConnection | ReceivingConnection]) -> None:
        for connection in connections:
            connection.close(self._pump.forget)

    # Connections

    def _of(self, peer: Peer) -> _PeerData:
        data: _PeerData | None = peer.data
        if data is None:
            with self._lock:
                data = peer.data
                if data is None:
                    arrivals = Arrivals(self._agent.pool.lease, self._limit_bytes)
                    data = peer.data = _PeerData(arrivals)
        return data

    def _adopt_sending(
        self, peer: Peer, data: _PeerData, connections: Sequence[socket.socket]
    ) -> None:
        sending = _Sending(data.set_count, Outbox(self._stripe_bytes))
        on_end = functools.partial(self._break_sending, peer, sending.number)
        with data.lock:
            self._check_open(data, connections)
            for one in connections:
                keep_alive(one, self._agent.links.patience.detection_s)
                connection = SendingConnection(one, sending.outbox, on_end)
                sending.outbox.add_connection()
                sending.connections.append(connection)
            # Within the lock: no connection may be closed before it is watched.
            for connection in sending.connections:
                self._pump.watch(connection.fd, connection.write, WRITABLE)
            data.sending = sending

    def _accept(self, peer: Peer, connection: socket.socket, number: int) -> None:
        """Accepts a connection of a numbered set, over which ``peer`` will send."""
        data = self._of(peer)
        keep_alive(connection, self._agent.links.patience.detection_s)
        with data.lock:
            self._check_open(data, [connection])
            if number <= data.broken_set:
                connection.close()
                return
            receiving = ReceivingConnection(
                connection,
                data.arrivals,
                lambda cause: self._on_end(peer, number, receiving, cause),
            )
            data.receiving.append(_Receiving(number, receiving))
            self._pump.watch(receiving.fd, receiving.read, READABLE)

    def _check_open(self, data: _PeerData, connections: Sequence[socket.socket]) -> None:
        if data.is_closed:
            for connection in connections:
                connection.close()
            raise ConnectionAbortedError("the peer is lost, or this worker has shut down")

    def _on_end(self, peer: Peer, number: int, receiving: ReceivingConnection, cause: str) -> None:
        if cause:
            self._agent.lose(peer, cause)
            return
        # A sender that shuts down ends all connections of a set. The end of one may be read before
        # data of the others that has arrived as well.
        data = self._of(peer)
        with data.lock:
            others = [each.connection for each in data.receiving if each.number <= number]
        for other in others:
            if cause := other.drain():
                self._agent.lose(peer, cause)
                return
        # The sender does not know which of the written data did not arrive.
        self._end_receiving(peer, number)
        self._close_all([receiving])
        if not self._of(peer).is_closed:
            self._agent.sender.post_ints(peer, Kind.DATA_BROKEN, number)

    # The end

    def give_up(self, peer: Peer) -> None:
        """Ends the connections with a lost peer; waits for its tensors fail now."""
        data = self._of(peer)
        with data.lock:
            data.is_closed = True
            sending, data.sending = data.sending, None
            receiving, data.receiving = data.receiving, []
            kept, data.kept = data.kept, {}
        data.arrivals.fail(functools.partial(self._end_error, peer))
        self._close_all([each.connection for each in receiving])
        if sending is not None:
            self._close_all(sending.connections)
            sending.outbox.close()
        kept.clear()

    def _end_error(self, peer: Peer) -> WeftError:
        if peer.lost is not None:
            return peer.lost_error()
        return NotInitialized(
            f"worker {self._agent.info.name!r} shut down before all of a tensor of worker "
            f"{peer.name!r} had come"
        )

    def close(self, limit_s: float = _DRAIN_LIMIT_S) -> None:
        """Sends waiting data, for at most ``limit_s``; then ends all connections and threads."""
        deadline_s = time.monotonic() + limit_s
        known = [peer.data for peer in list(self._agent.peers.values())]
        sets = [data.sending for data in known if data is not None]
        outboxes = [sending.outbox for sending in sets if sending is not None]
        while not all(box.is_empty for box in outboxes) and time.monotonic() < deadline_s:
            time.sleep(_DRAIN_POLL_S)
        for peer in list(self._agent.peers.values()):
            peer.accept_data = peer.dial_data = None
            if not peer.is_self:
                self.give_up(peer)
        self._pump.close()


def _transfers(table: BufferTable) -> dict[TransferKey, int]:
    """Returns the transfers of a message with their sizes, in order."""
    return {
        TransferKey(table.token, position): entry.size_bytes
        for position, entry in enumerate(table.of_kind(STRIPED))
    }
