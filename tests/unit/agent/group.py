"""A group of real agents in one process: their connections, threads and pulls are the real ones."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator

from torchweft.agent.agent import Agent
from torchweft.agent.members import Members
from torchweft.agent.peers import Peer
from torchweft.agent.protection import Protection
from torchweft.agent.references import ReferenceKeeper
from torchweft.agent.tensor_messages import TensorMessages
from torchweft.protocol.connecting import Patience, Terms
from torchweft.protocol.membership import Registration
from torchweft.transport.addresses import Address, listen_tcp, listen_unix
from torchweft.transport.resumable import ResumableLink

TOKEN = "0123456789abcdef0123456789abcdef"
"""Of the run: what the members of a group of these tests have in common."""
KEY = Protection.of_run(TOKEN).key
LIMIT_S = 20.0


class Member:
    """One worker, as far as the agent layer goes."""

    def __init__(self, agent: Agent, listener: socket.socket, address: Address) -> None:
        self.agent = agent
        self.listener = listener
        self.address = address
        self.tensor_messages = TensorMessages(agent)
        self.references = ReferenceKeeper(agent)

    def peer(self, other: Member) -> Peer:
        return self.agent.peers[other.agent.info.id]

    def session(self, other: Member) -> ResumableLink:
        """Returns the session with another member, which there must be."""
        link = self.peer(other).link
        assert isinstance(link, ResumableLink)
        return link

    def terms(self, other: Member) -> Terms:
        """Returns those of the session with another member, which there must be."""
        terms = self.peer(other).connecting.session
        assert terms is not None
        return terms

    def cut(self, other: Member) -> None:
        """Ends the connection with another member, without telling this one's link."""
        with contextlib.suppress(OSError):
            self.session(other)._socket.shutdown(socket.SHUT_RDWR)

    def start(self) -> None:
        self.agent.start([self.references.tick], when_lost=self._peer_lost)

    def _peer_lost(self, peer: Peer) -> None:
        self.tensor_messages.peer_lost(peer)
        self.agent.cancelling.peer_lost(peer)
        self.references.peer_lost(peer)
        self.agent.tell_watchers(peer)

    def close(self) -> None:
        self.tensor_messages.close()
        self.agent.close()


@contextlib.contextmanager
def group_of(
    size: int,
    threads: int = 2,
    over: str = "unix",
    patience: Patience | None = None,
    tokens: tuple[str, ...] = (),
) -> Iterator[list[Member]]:
    """Makes a group whose members are closed, those that live, at the end; start them yourself.

    Args:
        size: How many members.
        threads: How many tasks run at a time at each of them.
        over: What they reach each other by: ``"unix"`` or ``"tcp"``, where they have sessions.
        patience: See ``Agent``.
        tokens: What each of them takes for the run's; the same for all by default.
    """
    listeners = [listen_tcp("127.0.0.1") if over == "tcp" else listen_unix() for _ in range(size)]
    registrations = [
        Registration(f"worker{rank}", rank, (str(address),), main="tests")
        for rank, (_, address) in enumerate(listeners)
    ]
    members = []
    for rank, (listener, address) in enumerate(listeners):
        others = [each for each in registrations if each.id != rank]
        known = Members(registrations[rank], others, is_open=False)
        protection = Protection.of_run(tokens[rank] if tokens else TOKEN)
        agent = Agent(protection, known, [listener], threads, math.inf, patience)
        members.append(Member(agent, listener, address))
    try:
        yield members
    finally:
        for member in members:
            member.close()


def wait_until(is_so: Callable[[], object], what: str = "it") -> None:
    """Waits for a limited time until something is so."""
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what} did not come to be"
        time.sleep(0.001)
