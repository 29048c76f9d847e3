"""Ports: values that one worker sends to a thread of another, without calls and answers.

For applications that exchange many small values in steps, such as the stages of a pipeline. A value
costs about half of a call: nothing is run, answered or waited for. The thread that reads the
connection passes the message on as it is; the thread that owns the port decodes it.

A value is delivered at most once. Values of one sending thread to one receiver arrive in order. The
sender is not told whether a value was read. A group that shuts down does not wait for values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchweft.agent.agent import Slot
from torchweft.agent.peers import Peer
from torchweft.agent.tensor_messages import LocalMessage
from torchweft.errors import ConfigurationError, ProtocolError
from torchweft.rpc.worker import Worker
from torchweft.wire.frames import Frame
from torchweft.wire.messages import TABLES, Kind, decode_call

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

    def post(self, peer: Peer, port: int, values: Sequence[Any]) -> None:
        """Sends values to a port of another worker. Blocks for as long as its socket is full.

        Args:
            peer: The receiver.
            port: Its port.
            values: Anything that arguments of a call may be.

        Raises:
            SerializationError: A value cannot travel.
            WorkerLost: The receiver is known to be lost; ``on_worker_lost`` tells of a later loss.
        """
        request = self._worker.request(peer, b"", values, {}, math.inf)
        try:
            self._worker.agent.sender.send(peer, request.post(port))
        except Exception:
            request.take_back()
            raise

    def read(self, peer: Peer, frame: Frame) -> Sequence[Any]:
        """Returns the values in a message. May block to fetch large tensors.

        Raises:
            ProtocolError: The message is malformed.
            WorkerLost: The sender was lost before its tensors could be fetched.
        """
        worker = self._worker
        control: Any = frame.control
        if type(control) is LocalMessage:
            _, _, _, head = control.head
            values = worker.open_own(control, head[0])
        else:
            _, _, _, head = decode_call(control)
            message = None
            if frame.flags & TABLES:
                message = worker.tensor_messages.read(frame)
                try:
                    worker.tensor_messages.fetch(peer, message)
                except Exception:
                    worker.refuse(peer, head)
                    raise
            values = worker.open(peer, control, head, message)
        if not isinstance(values, (tuple, list)):
            raise ProtocolError(f"a message for a port has {type(values).__name__}, not values")
        return values

    def discard(self, peer: Peer, frame: Frame) -> None:
        """Releases at its sender all that an unread message holds there.

        Raises:
            ProtocolError: The message is malformed.
        """
        control: Any = frame.control
        if type(control) is LocalMessage:
            return
        worker = self._worker
        _, _, _, head = decode_call(control)
        if frame.flags & TABLES:
            worker.tensor_messages.discard(peer, worker.tensor_messages.read(frame))
        worker.refuse(peer, head)

    def _on_message(self, peer: Peer, frame: Frame) -> None:
        take = self._takes.get(frame.id)
        if take is None:
            self.discard(peer, frame)
        else:
            take(peer, frame)


PORTS: Slot[Ports] = Slot()
