"""A group of real agents in one process: their connections, threads and pulls are the real ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from weft.agent.agent import Agent
from weft.agent.members import Members
from weft.agent.parcels import ParcelService
from weft.agent.peers import Peer
from weft.agent.references import ReferenceKeeper
from weft.protocol.membership import Registration
from weft.transport.addresses import listen_unix


class Member:
    """One worker, as far as the agent layer goes."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.parcels = ParcelService(agent)
        self.references = ReferenceKeeper(agent)

    def peer(self, other: Member) -> Peer:
        return self.agent.peers[other.agent.info.id]

    def start(self) -> None:
        self.agent.start([self.references.tick])

    def close(self) -> None:
        self.parcels.close()
        self.agent.close()


@contextlib.contextmanager
def group_of(size: int, threads: int = 2) -> Iterator[list[Member]]:
    """Makes a group whose members are closed, those that live, at the end; start them yourself."""
    listeners = [listen_unix() for _ in range(size)]
    registrations = [
        Registration(f"worker{rank}", rank, (str(address),), main="tests")
        for rank, (_, address) in enumerate(listeners)
    ]
    members = []
    for rank, (listener, _) in enumerate(listeners):
        others = [each for each in registrations if each.id != rank]
        known = Members(registrations[rank], others, is_open=False)
        members.append(Member(Agent("token", known, [listener], threads, math.inf)))
    yield members
    for member in members:
        member.close()
