"""Answers on their way out: those of one batch of calls go together."""

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
    """The small answers of one worker. Thread-safe.

    Each write wakes the caller, and takes as long as a small call. So while more calls wait to be
    run, answers are held. They go out with the last one, before a function that takes long, and
    after ``knobs.REARM_S`` in any case.

    Args:
        reactor: Runs the calls; it says when answers may not be held any longer.
        arm_soon: Has the timers see to the reactor, and to what it holds, soon.
        sender: Sends where there is no connection.
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
        """Sends an answer, a whole frame, now or together with the next ones.

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
                self._arm_soon()  # The timers write it, too.
        except LinkClosed as error:
            self._lose(peer, str(error))
            raise self._lifetime.error_of(peer) from error

    def write_held(self) -> None:
        """Writes all that is held; never blocks."""
        held = self._reactor.held
        while held:
            try:
                link, peer = held.popitem()
            except KeyError:
                return  # Another thread was faster.
            try:
                link.write_held()
            except LinkClosed as error:
                self._lose(peer, str(error))
