"""Ports: values that one worker sends to a thread of another, without calls and answers.

For applications that exchange many small values in steps, such as the stages of a pipeline. A value
costs less than half of a call: nothing is run, answered or waited for. The thread that reads the
connection passes the message on as it is; the thread that owns the port decodes it.

A value is delivered at most once. Values of one sending thread to one receiver arrive in order. The
sender is not told whether a value was read. A group that shuts down does not wait for values.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchweft.engine.threads.reactor import Parts
from torchweft.engine.wire.frames import Frame
from torchweft.engine.wire.messages import TABLES, Kind, decode_call
from torchweft.engine.worker.agent import Agent, Slot
from torchweft.engine.worker.calls import Spins, kinds_of
from torchweft.engine.worker.peers import Peer
from torchweft.engine.worker.tensor_messages import LocalMessage
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.rpc.worker import Worker

Take = Callable[[Peer, Frame], object]
"""Takes a message as soon as it is read; must only store it. ``Ports.read`` decodes it."""


class Ports:
    """The ports of one worker. Thread-safe.

    Args:
        worker: Encodes and decodes the values.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._takes: dict[int, Take] = {}
        self._lock = threading.Lock()
        worker.agent.receiver.on(Kind.POST, self._on_message, inline=True)

    def open(self, number: int, take: Take) -> None:
        """Has ``take`` called with each message for a port.

        Args:
            number: The port, from 1 to 2**64 - 1; all workers that send to it know it.
            take: Called by the thread that reads the message.

        Raises:
            ConfigurationError: The port is open.
        """
        with self._lock:
            if number in self._takes:
                raise ConfigurationError(f"port {number} of this worker is open already")
            self._takes[number] = take

    def close(self, number: int) -> None:
        """Ends a port; what still comes for it is discarded. Does nothing if it is not open."""
        self._takes.pop(number, None)

    def post(self, peer: Peer, port: int, head: bytes, values: Sequence[Any]) -> None:
        """Sends values to a port of another worker. Blocks for as long as its socket is full.

        Args:
            peer: The receiver.
            port: Its port.
            head: At most 65,535 bytes, which say to the receiver what the values are.
            values: Anything that arguments of a call may be.

        Raises:
            SerializationError: A value cannot travel.
            WorkerLost: The receiver is known to be lost; ``on_worker_lost`` tells of a later loss.
        """
        request = self._worker.encoder.post(peer, head, values)
        try:
            self._worker.agent.sender.send(peer, request.message(port))
        except BaseException:
            request.take_back()
            raise

    def listener(self, number: int, inbox: queue.SimpleQueue[Any]) -> Listener:
        """Returns a listener for the thread that owns a port.

        Args:
            number: The port.
            inbox: Where its ``take`` puts messages.
        """
        return Listener(self._worker.agent, number, inbox)

    def read(self, peer: Peer, frame: Frame) -> tuple[bytes, Sequence[Any]]:
        """Returns the head and the values of a message. May block to fetch large tensors.

        Raises:
            ProtocolError: The message is malformed.
            WorkerLost: The sender was lost before its tensors could be fetched.
        """
        worker = self._worker
        control: Any = frame.control
        if type(control) is LocalMessage:
            _, _, told, *_, head = control.head
            values = worker.decoder.open_own(control, head[0])
        else:
            _, _, told, *_, head = decode_call(control)
            message = None
            if frame.flags & TABLES:
                message = worker.tensor_messages.read(frame)
                try:
                    worker.tensor_messages.fetch(peer, message)
                except Exception:
                    worker.decoder.refuse(peer, head)
                    raise
            values = worker.decoder.open(peer, control, head, message)
        if type(values) is not tuple:
            raise ProtocolError("a message for a port has no values")
        return told, values

    def discard(self, peer: Peer, frame: Frame) -> None:
        """Releases at its sender all that an unread message holds there.

        Raises:
            ProtocolError: The message is malformed.
        """
        control: Any = frame.control
        if type(control) is LocalMessage:
            return
        worker = self._worker
        *_, head = decode_call(control)
        if frame.flags & TABLES:
            worker.tensor_messages.discard(peer, worker.tensor_messages.read(frame))
        worker.decoder.refuse(peer, head)

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        take = self._takes.get(frame.id)
        if take is None:
            self.discard(peer, frame)
        else:
            take(peer, frame)


class Listener:
    """Lets the thread that owns a port wait for a message of one worker. For one thread.

    In the native twin it reads the connection itself. Between two waits a connection stays unarmed,
    so that a message which arrives then wakes no thread either; the timer thread arms it if the
    owner works for longer than ``knobs.REARM_S``.

    Args:
        agent: The worker's agent.
        port: The port.
        inbox: Gets the messages for the port, from all threads that read; ``wake`` must follow
            each that is put there.
    """

    def __init__(self, agent: Agent, port: int, inbox: queue.SimpleQueue[Any]) -> None:
        self._agent = agent
        self._port = port
        self._inbox = inbox
        self._unarmed: set[int] = set()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting = 0  # the thread that waits

    def wake(self) -> None:
        """Ends a wait of the owner, so that it looks at its inbox; nothing in its own thread."""
        # Race: the owner notes that it waits, and then looks at the inbox.
        if self._waiting and self._waiting != threading.get_ident():
            with contextlib.suppress(OSError):  # The owner has closed it.
                os.eventfd_write(self._wake_fd, 1)

    def wait(self, peer: Peer, deadline_s: float, parts: Parts) -> None:
        """Reads the connection to ``peer`` until there is a message in the inbox.

        Returns without one if the message is to be awaited at the inbox: where another thread reads
        the connection, the peer is lost, or the time is up.

        Args:
            peer: The worker whose message is awaited.
            deadline_s: By the clock of ``time.monotonic``.
            parts: What the thread waits for, as ``Reactor.waiting`` takes it.
        """
        agent = self._agent
        lease = agent.waiter.lease((peer,))
        if lease is None:
            return
        link = peer.link
        assert link is not None
        agent.reactor.unarmed.pop(link.read_fd, 0)
        taken: list[Frame] = []
        self._waiting = threading.get_ident()
        try:
            agent.waiter.read(
                lease,
                (_POSTS, self._port, taken, None),
                Spins.PASSES,
                deadline_s,
                lambda: not self._inbox.empty() or peer.lost,
                parts,
                self._wake_fd,
            )
        finally:
            self._waiting = 0
            leaves_unarmed = True
            lease.release(leaves_unarmed)
            self._unarmed.add(link.read_fd)
            agent.reactor.leave_unarmed(link.read_fd)
        for frame in taken:
            agent.receiver.take(peer, frame)

    def rest(self) -> None:
        """Has other threads read the connections again, before this one waits in another way."""
        reactor = self._agent.reactor
        while self._unarmed:
            reactor.arm(self._unarmed.pop())

    def close(self) -> None:
        """Frees the descriptor; the owner does not wait any more."""
        self.rest()
        os.close(self._wake_fd)


_POSTS = kinds_of(Kind.POST)
PORTS: Slot[Ports] = Slot()
