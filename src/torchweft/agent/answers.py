"""Answers on their way out: those of one batch of calls go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweft.agent.peers import Peer
from torchweft.transport.link import LinkClosed
from torchweft.wire.frames import Buffer

if TYPE_CHECKING:
    from torchweft.agent.agent import Agent

_MOST_HELD = 64


class Answers:
    """The small answers of one worker. Thread-safe.

    Each write wakes the caller, and takes as long as a small call. So while more calls wait to be
    run, answers are held. They go out with the last one, before a function that takes long, and
    after ``knobs.REARM_S`` in any case.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def send(self, peer: Peer, part: Buffer) -> None:
        """Sends an answer, a whole frame, now or together with the next ones.

        Raises:
            WorkerLost: The peer cannot be reached.
            NotInitialized: This worker has shut down.
        """
        agent, link = self._agent, peer.link
        if link is None:
            agent.send(peer, [part])
            return
        reactor = agent.reactor
        try:
            if not reactor.tasks.turns:
                link.send([part], may_block=True)
                return
            count = link.hold(part)
            reactor.held[link] = peer
            if count >= _MOST_HELD:
                link.write_held()
            elif count == 1:
                agent.upkeep.arm_soon()  # The housekeeper writes it, too.
        except LinkClosed as error:
            agent.lose(peer, str(error))
            raise agent.closed_error(peer) from error

    def write_held(self) -> None:
        """Writes all that is held; never blocks."""
        held = self._agent.reactor.held
        while held:
            try:
                link, peer = held.popitem()
            except KeyError:
                return  # Another thread was faster.
            try:
                link.write_held()
            except LinkClosed as error:
                self._agent.lose(peer, str(error))
