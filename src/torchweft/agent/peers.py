"""The other workers as one worker sees them: how to reach each, and whether it is still there."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchweft.agent.deaths import cause_of
from torchweft.channel.choice import Channels
from torchweft.channel.sending import HeldTensors
from torchweft.errors import WorkerLost
from torchweft.protocol.calls import ServedCall
from torchweft.protocol.membership import Registration
from torchweft.transport.link import Link

if TYPE_CHECKING:
    from torchweft.agent.agent import Outgoing


class Unsent:
    """A message that waits for the first connection to its receiver.

    Args:
        message: What is to be sent.
    """

    def __init__(self, message: Outgoing) -> None:
        self._message = message

    def make(self) -> Outgoing:
        """Returns what to send; an error that it raises is given to ``drop``."""
        return self._message

    def is_wanted(self) -> bool:
        """Whether it is still to be sent."""
        return True

    def drop(self, error: Exception | None) -> None:
        """Is told that the message will not be sent, and why; None where it is not wanted."""


class Unreachable(ConnectionError):
    """Nobody answers where a peer said it listens; the agent declares the peer lost."""


class Peer:
    """One worker of the group, seen from another (or from itself).

    A connection is made when it is first needed, by whoever needs it. If both sides dial at
    once, the connection dialled by the higher rank stays: the acceptor turns the other one away
    with the answer ``crossed``, and its dialler waits for the one that stays.

    Args:
        registration: What the peer said of itself when it joined.
        main_by_name: Whether both run the same main program, so that its functions go by name.
    """

    def __init__(self, registration: Registration, *, main_by_name: bool, is_self: bool) -> None:
        self.registration = registration
        self.info = registration.info
        self.id = registration.id
        self.name = registration.name
        self.main_by_name = main_by_name
        self.is_self = is_self
        # Both are of use once there is a connection.
        self.channels = Channels(self.name, 0)
        self.held = HeldTensors()
        self.link: Link | None = None
        self.unsent: deque[Unsent] = deque()
        """What waits for the first connection; see ``torchweft.agent.first_contacts``."""
        self.lost: WorkerLost | None = None
        # Of use once there is somebody who takes data connections, and, to dial them, a link.
        self.accept_data: Callable[[socket.socket, int], None] | None = None
        self.dial_data: Callable[[int, int], list[socket.socket]] | None = None
        self.reach_data: Callable[[], bool] = lambda: False
        self.is_dialling = False
        self.is_accepting = False
        self.is_departing = False
        """Whether the peer has said that it leaves an open group."""
        self.farewell = ""
        """Why the peer said that it leaves, where it did."""
        self.served: dict[int, ServedCall] = {}
        """Calls of the peer that this worker has received and not ended, by their numbers."""
        self.state_lock = threading.Lock()
        self.dial_lock = threading.Lock()
        self.linked = threading.Event()

    def declare_lost(self, cause: str) -> WorkerLost | None:
        """Marks the peer as lost; returns the error for those who wait, None if it was already.

        Where the launcher may know better why, this waits for that, a few milliseconds.
        """
        if self.lost is None and not self.is_departing:
            cause = self.farewell or cause_of(self.registration.facts, cause)
        with self.state_lock:
            if self.lost is not None:
                return None
            since = time.time()
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            who = f"worker {self.name!r} (rank {self.info.id})"
            if self.is_departing:
                cause = "left the group"
                text = f"{who} has left the group at {clock}"
            else:
                text = f"{who} is lost since {clock}: {cause}"
            self.lost = WorkerLost(
                text,
                worker=self.name,
                since=since,
                cause=cause,
            )
            self.linked.set()
            return self.lost

    def lost_error(self) -> WorkerLost:
        """Returns a fresh copy of the error, so that tracebacks of many raisers do not mix."""
        lost = self.lost
        assert lost is not None
        return type(lost)(str(lost), worker=lost.worker, since=lost.since, cause=lost.cause)
