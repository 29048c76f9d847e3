"""Outgoing answers: those of one batch of calls are written together."""

from __future__ import annotations

from collections.abc import Callable

from torchweft.agent.lifetime import Lifetime
from torchweft.agent.peers import Peer
from torchweft.agent.sending import Sender
from torchweft.runtime.reactor import Reactor
from torchweft.transport.link import LinkClosed
from torchweft.wire.frames import Buffer

_MOST_HELD = 64


class Answers:
    """Sends the small answers of one worker. Thread-safe.

    Each write wakes the caller, and takes as long as a small call. So answers are held while more
    calls wait to run. Held answers are written with the last answer, before a function that takes
    long, and after ``knobs.REARM_S`` in any case.

    Args:
        reactor: Runs the calls; signals when answers may no longer be held.
        arm_soon: Has the timer thread re-arm connections and write held answers soon.
        sender: Sends answers to peers without a connection.
        lifetime: Whether the worker still takes part.
        lose: Declares a peer lost, with the cause.
    """

    def __init__(
        self,
        reactor: Reactor,
        arm_soon: Callable[[], None],
        sender: Sender,
        lifetime: Lifetime,
        lose: Callable[[Peer, str], None],
    ) -> None:
        self._reactor = reactor
        self._arm_soon = arm_soon
        self._sender = sender
        self._lifetime = lifetime
        self._lose = lose
        reactor.on_pause = self.write_held

    def send(self, peer: Peer, part: Buffer) -> None:
        """Sends an answer (one whole frame) now, or together with later answers.

        Raises:
            WorkerLost: The peer cannot be reached.
            NotInitialized: This worker has shut down.
        """
        link = peer.link
        if link is None:
            self._sender.send(peer, [part])
            return
        reactor = self._reactor
        try:
            if not reactor.tasks.ready:
                link.send([part], may_block=True)
                return
            count = link.hold(part)
            reactor.held[link] = peer
            if count >= _MOST_HELD:
                link.write_held()
            elif count == 1:
                self._arm_soon()  # The timer thread writes held answers, too.
        except LinkClosed as error:
            self._lose(peer, str(error))
            raise self._lifetime.error_of(peer) from error

    def write_held(self) -> None:
        """Writes all held answers; never blocks."""
        held = self._reactor.held
        while held:
            try:
                link, peer = held.popitem()
            except KeyError:
                return  # Race: another thread has taken the last answer.
            try:
                link.write_held()
            except LinkClosed as error:
                self._lose(peer, str(error))
