"""Large tensors between a worker and the others, over connections of their own.

What ``weft.transport.striped`` moves, this file dials, accepts, waits for and gives up. The
sender dials when it has the first large tensor for a peer, and says in its greeting what the
connection is for; it runs one way only. The message goes over the control link at once, and says
by its token what the receiver is to wait for.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Sequence

from weft import knobs
from weft.agent.agent import Agent
from weft.agent.peers import Peer
from weft.channel.table import STRIPED, BufferTable
from weft.errors import NotInitialized, ProtocolError, WeftError
from weft.transport.striped.arriving import Arrivals, ReceivingConnection
from weft.transport.striped.outgoing import Outbox, SendingConnection
from weft.transport.striped.pump import READABLE, WRITABLE, Pump
from weft.transport.striped.stripes import TransferKey

_DRAIN_LIMIT_S = 5.0
_DRAIN_POLL_S = 0.001
_SPARE_WAITS = 16
"""How many tasks may wait for tensors without counting as running; each takes a thread."""


class _PeerData:
    """The data connections with one peer, in both directions."""

    def __init__(self, arrivals: Arrivals, outbox: Outbox) -> None:
        self.arrivals = arrivals
        self.outbox = outbox
        self.dial_lock = threading.Lock()
        self.lock = threading.Lock()
        self.sending: list[SendingConnection] = []
        self.receiving: list[ReceivingConnection] = []
        self.is_closed = False


class DataConnections:
    """The data connections of one worker. Thread-safe.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._pump = Pump(f"weft-{agent.info.name}-data", knobs.STRIPE_THREADS.get())
        self._stripe_bytes = knobs.STRIPE_BYTES.get()
        self._connection_count = knobs.STRIPE_CONNECTIONS.get()
        self._stall_s = knobs.STRIPE_STALL_S.get()
        self._limit_bytes = knobs.FRAME_LIMIT_BYTES.get()
        self._lock = threading.Lock()
        self._data: dict[int, _PeerData] = {}
        self._spare_waits = threading.Semaphore(_SPARE_WAITS)
        agent.members.on_joined(self._offer)
        agent.on_lost(self._give_up)
        agent.on_departed(self._give_up)

    def _offer(self, peer: Peer) -> None:
        peer.accept_data = functools.partial(self._accept, peer)
        peer.reach_data = functools.partial(self._reach, peer)

    # Sending

    def _reach(self, peer: Peer) -> bool:
        """Connects to a peer, if that has not been done; returns False where it cannot.

        Blocks for a limited time.
        """
        data = self._of(peer)
        with data.dial_lock:
            if data.sending or data.is_closed or peer.dial_data is None:
                return bool(data.sending)
            try:
                connections = peer.dial_data(self._connection_count)
                self._adopt_sending(peer, data, connections)
            except (OSError, ProtocolError) as error:
                if data.is_closed:
                    return False  # lost meanwhile
                peer.channels.disable(STRIPED, f"no data connection can be made: {error}")
                return False
        return True

    def send(self, peer: Peer, token: int, buffers: Sequence[memoryview], *, waits: bool) -> None:
        """Sends transfers over the connections that there are; they are kept until written.

        Args:
            peer: Where to.
            token: Of the message that they belong to.
            buffers: Contiguous memory, none of it empty.
            waits: Whether to block while much is waiting to be sent to the peer. Not for a thread
                that others rely on to read a connection.
        """
        data = self._of(peer)
        if waits:
            data.outbox.wait_for_room()
        started = data.outbox.put(token, buffers)
        for connection in started[1:]:
            self._pump.arm(connection.fd, WRITABLE)
        # The first share leaves from this thread: the others would have to be woken first.
        for connection in started[:1]:
            self._pump.arm(connection.fd, connection.write())

    # Receiving

    def fetch(self, peer: Peer, table: BufferTable) -> list[memoryview]:
        """Blocks until the transfers of a message are here; returns their memory, in order.

        Raises:
            WorkerLost: The sender was lost before all had come.
            ProtocolError: What came has another size than the message says.
        """
        arrivals = self._of(peer).arrivals
        sizes = _transfers(table)
        if all(map(arrivals.is_here, sizes)):
            return self._wait(peer, arrivals, sizes)
        reactor = self._agent.reactor
        is_spare = self._spare_waits.acquire(blocking=False)
        is_counted = is_spare and reactor.begin_wait()
        if not is_spare:
            reactor.wake()  # What is urgent must not wait for this thread.
        try:
            return self._wait(peer, arrivals, sizes)
        finally:
            if is_counted:
                reactor.end_wait()
            if is_spare:
                self._spare_waits.release()

    def _wait(
        self, peer: Peer, arrivals: Arrivals, sizes: dict[TransferKey, int]
    ) -> list[memoryview]:
        try:
            buffers = [arrivals.wait(key, size, self._stall_s) for key, size in sizes.items()]
        except TimeoutError as error:
            self._agent.lose(peer, f"a tensor that it has announced does not come: {error}")
            raise self._end_error(peer) from error
        self._agent.pulled_bytes += sum(sizes.values())
        return buffers

    def drop(self, peer: Peer, table: BufferTable) -> None:
        """Notes that nobody will fetch the transfers of a message: they go when they are here."""
        arrivals = self._of(peer).arrivals
        for key, size_bytes in _transfers(table).items():
            arrivals.discard(key, size_bytes)

    # Connections

    def _of(self, peer: Peer) -> _PeerData:
        data = self._data.get(peer.id)
        if data is None:
            with self._lock:
                data = self._data.get(peer.id)
                if data is None:
                    arrivals = Arrivals(self._agent.pool.lease, self._limit_bytes)
                    data = _PeerData(arrivals, Outbox(self._stripe_bytes))
                    self._data[peer.id] = data
        return data

    def _adopt_sending(
        self, peer: Peer, data: _PeerData, connections: Sequence[socket.socket]
    ) -> None:
        on_end = functools.partial(self._agent.lose, peer)
        with data.lock:
            self._check_open(data, connections)
            sending = [SendingConnection(one, data.outbox, on_end) for one in connections]
            for connection in sending:
                data.outbox.add_connection()
                self._pump.watch(connection.fd, connection.write, WRITABLE)
            data.sending = sending

    def _accept(self, peer: Peer, connection: socket.socket) -> None:
        """Takes a connection over which ``peer`` is going to send."""
        data = self._of(peer)
        with data.lock:
            self._check_open(data, [connection])
            receiving = ReceivingConnection(
                connection, data.arrivals, lambda cause: self._on_end(peer, receiving, cause)
            )
            data.receiving.append(receiving)
            self._pump.watch(receiving.fd, receiving.read, READABLE)

    def _check_open(self, data: _PeerData, connections: Sequence[socket.socket]) -> None:
        if data.is_closed:
            for connection in connections:
                connection.close()
            raise ConnectionAbortedError("the peer is lost, or this worker has shut down")

    def _on_end(self, peer: Peer, receiving: ReceivingConnection, cause: str) -> None:
        if cause:
            self._agent.lose(peer, cause)
            return
        data = self._of(peer)
        with data.lock:
            if receiving in data.receiving:
                data.receiving.remove(receiving)
            is_last = not data.receiving
        self._pump.forget(receiving.fd)
        receiving.close()
        # Between two stripes the peer may leave. If it is gone altogether, its link says so.
        if is_last and data.arrivals.is_incomplete:
            self._agent.lose(peer, "its data connections ended within a tensor")

    # The end

    def _give_up(self, peer: Peer) -> None:
        """Ends the connections with a lost peer; whoever waits for its tensors fails now."""
        data = self._of(peer)
        with data.lock:
            data.is_closed = True
            connections: list[SendingConnection | ReceivingConnection]
            connections = [*data.sending, *data.receiving]
            data.receiving = []
        data.arrivals.fail(functools.partial(self._end_error, peer))
        for connection in connections:
            self._pump.forget(connection.fd)
            connection.close()
        data.outbox.close()

    def _end_error(self, peer: Peer) -> WeftError:
        if peer.lost is not None:
            return peer.lost_error()
        return NotInitialized(
            f"worker {self._agent.info.name!r} shut down before all of a tensor of worker "
            f"{peer.name!r} had come"
        )

    def close(self) -> None:
        """Sends what is waiting, for a limited time, and ends all connections and threads."""
        deadline_s = time.monotonic() + _DRAIN_LIMIT_S
        with self._lock:
            outboxes = [data.outbox for data in self._data.values()]
        while not all(box.is_empty for box in outboxes) and time.monotonic() < deadline_s:
            time.sleep(_DRAIN_POLL_S)
        for peer in list(self._agent.peers.values()):
            peer.accept_data = peer.dial_data = None
            if not peer.is_self:
                self._give_up(peer)
        self._pump.close()


def _transfers(table: BufferTable) -> dict[TransferKey, int]:
    """Returns the transfers of a message with their sizes, in order."""
    return {
        TransferKey(table.token, position): entry.size_bytes
        for position, entry in enumerate(table.of_kind(STRIPED))
    }
