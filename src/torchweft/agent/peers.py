"""The other workers as one worker sees them: how to reach each, and whether it is still there."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from torchweft.agent.deaths import cause_of
from torchweft.channel.choice import Channels
from torchweft.channel.sending import HeldTensors
from torchweft.errors import WorkerLost
from torchweft.protocol.calls import ServedCall
from torchweft.protocol.connecting import Connecting, Patience, State, Terms
from torchweft.protocol.membership import Registration
from torchweft.transport.link import Link
from torchweft.wire.frames import Buffer, Frame

Outgoing = list[Buffer] | Frame
"""A message to send: bytes to write or, from a worker to itself, a frame as it is received."""


class Unsent:
    """A message that waits for the first connection to its receiver.

    Args:
        message: The message to send.
    """

    def __init__(self, message: Outgoing) -> None:
        self._message = message

    def make(self) -> Outgoing:
        """Returns the message to send; an exception raised here is passed to ``drop``."""
        return self._message

    def is_wanted(self) -> bool:
        """Whether the message is still to be sent."""
        return True

    def drop(self, error: Exception | None) -> None:
        """Called if the message will not be sent; ``error`` is None if it is not wanted."""


class Unreachable(ConnectionError):
    """A peer does not answer at its addresses; the agent declares the peer lost."""


class Peer:
    """One worker of the group, seen from another (or from itself).

    The side that first needs the connection makes it; ``connecting`` decides how. ``link`` and
    ``lost``, which every message needs, are plain attributes, set as the state machine says.

    Args:
        registration: The registration with which the peer joined.
        main_by_name: Whether both workers run the same main program, so that its functions are sent
            by name.
    """

    def __init__(self, registration: Registration, *, main_by_name: bool, is_self: bool) -> None:
        self.registration = registration
        self.info = registration.info
        self.id = registration.id
        self.name = registration.name
        self.main_by_name = main_by_name
        self.is_self = is_self
        # Both are used once there is a connection.
        self.channels = Channels(self.name, 0)
        self.held = HeldTensors()
        self.link: Link | None = None
        self.unsent: deque[Unsent] = deque()
        """Messages that wait for the first connection; see ``torchweft.agent.first_contacts``."""
        self.lost: WorkerLost | None = None
        # Set by ``DataConnections``; ``dial_data`` is set once there is a link.
        self.accept_data: Callable[[socket.socket, int], None] | None = None
        self.dial_data: Callable[[int, int], list[socket.socket]] | None = None
        self.reach_data: Callable[[], bool] = lambda: False
        self.served: dict[int, ServedCall] = {}
        """Calls of the peer that this worker has received and not ended, by their numbers."""
        self.connecting = Connecting(self.id, self.name)
        """State machine of the connection; to be used with ``state_lock``."""
        self.state_lock = threading.Lock()
        self.dial_lock = threading.Lock()
        """Held by the thread that carries out the steps of the first connection."""
        self.linked = threading.Event()
        """Set when there is a first connection, or never will be."""

    def adopt(self, link: Link, terms: Terms | None, patience: Patience) -> str:
        """Installs the connection to the peer; returns the obstacle, or an empty string."""
        with self.state_lock:
            obstacle = self.connecting.adopt(time.monotonic(), terms, patience)
            if not obstacle:
                self.link = link
        return obstacle

    def depart(self) -> None:
        """Records that the peer leaves an open group, so that its end is not a loss."""
        with self.state_lock:
            self.connecting.depart()

    def declare_lost(self, cause: str) -> WorkerLost | None:
        """Marks the peer as lost; returns the error for waiting threads, None if lost already.

        Waits a few milliseconds for the launcher's note if that may tell the cause.
        """
        connecting = self.connecting
        if not connecting.knows_cause:
            cause = cause_of(self.registration.facts, cause)
        with self.state_lock:
            known = connecting.lose(cause)
            if known is None:
                return None
            since = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            who = f"worker {self.name!r} (rank {self.info.id})"
            if connecting.state is State.LEFT:
                text = f"{who} has left the group at {clock}"
            else:
                text = f"{who} is lost since {clock}: {known}"
            self.lost = WorkerLost(text, worker=self.name, since=since, cause=known)
            self.linked.set()
            return self.lost

    def lost_error(self) -> WorkerLost:
        """Returns a fresh copy of the error, so that tracebacks of many raisers do not mix."""
        lost = self.lost
        assert lost is not None
        return type(lost)(str(lost), worker=lost.worker, since=lost.since, cause=lost.cause)
