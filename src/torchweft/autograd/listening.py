"""Lets the thread that leads a backward pass read the connections itself while it waits.

A thread that is woken by another thread, which the kernel woke, waits for two wake-ups. So the
leading thread takes over the connections of all workers that may send to it, before it sends
anything itself. It returns them before it runs a graph, which may take long. If another thread of
this worker already reads one of them, or there are many, other threads wake the leading thread.
"""

from __future__ import annotations

import select
import time
from _thread import get_ident
from collections.abc import Callable, Collection

from torchweft.agent.agent import Agent
from torchweft.agent.peers import Peer
from torchweft.runtime import interrupts
from torchweft.transport.link import READ_TICK_S, Link
from torchweft.transport.spinning import Spinning

Reading = list[tuple[Peer, Link]]

_PASS_IN_CALLS = 3
"""How much longer to spin for the answer of a small pass than for that of a small call."""

_MOST_READ = 8
"""The most connections for which taking over, at each wait, costs less than being woken."""


class Listener:
    """Reads connections for threads of one worker that lead passes. Thread-safe.

    Args:
        agent: The worker's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Separate from those of calls: each adapts to its own waits, which differ.
        self._spinnings: dict[int, Spinning] = {}

    def take_over(self, peers: Collection[Peer]) -> Reading:
        """Takes over the connections of ``peers``: all, or none if one is unavailable."""
        reading: Reading = []
        # The main thread could be interrupted while it handles what it has read.
        if len(peers) > _MOST_READ or get_ident() == interrupts.main_id:
            return reading
        for peer in peers:
            link = peer.link
            if link is None or link.readers.setdefault(0, reading) is not reading:
                self.give_back(reading)
                return []
            reading.append((peer, link))
            if link.is_free:
                self.give_back(reading)  # Its worker is lost.
                return []
            self._agent.reactor.pause_reading(link.read_fd)
        return reading

    def give_back(self, reading: Reading) -> None:
        """Returns connections to the other threads of this worker."""
        for _, link in reading:
            link.readers.pop(0)
            self._agent.reactor.resume_reading(link.read_fd)

    def read_until(self, reading: Reading, inbox: Collection[object], deadline_s: float) -> None:
        """Reads until ``inbox`` is not empty, a worker is lost, or the time is up.

        Args:
            reading: The connections that ``take_over`` returned; not empty.
            inbox: Filled by the handlers of received messages.
            deadline_s: By the clock of ``time.monotonic``.
        """
        reactor = self._agent.reactor
        read = self._read_one(*reading[0]) if len(reading) == 1 else self._read_any(reading)
        spinning = self._spinning_of(reading[0][0])
        if not inbox and spinning.is_worthwhile():
            read(spinning)
            self._wake_for_tasks()
        if inbox:
            return
        is_counted = reactor.begin_wait()
        try:
            while not (inbox or _is_any_lost(reading)) and time.monotonic() < deadline_s:
                read(None)
                self._wake_for_tasks()
        finally:
            if is_counted:
                reactor.end_wait()

    def _wake_for_tasks(self) -> None:
        reactor = self._agent.reactor
        if reactor.tasks.ready or reactor.urgent:
            reactor.wake()

    def _spinning_of(self, peer: Peer) -> Spinning:
        spinning = self._spinnings.get(peer.id)
        if spinning is None:
            spinning = self._spinnings[peer.id] = Spinning()
            spinning.spin_s *= _PASS_IN_CALLS
        return spinning

    def _read_one(self, peer: Peer, link: Link) -> Callable[[Spinning | None], object]:
        """Returns a function that reads one connection, spinning or blocking briefly."""
        read = self._agent.receiver.read
        return lambda spinning: read(peer, link, may_block=spinning is None, spinning=spinning)

    def _read_any(self, reading: Reading) -> Callable[[Spinning | None], object]:
        """Returns a function that reads those of several connections that have data."""
        poll = select.poll()
        by_fd = {link.read_fd: (peer, link) for peer, link in reading}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)

        def read(spinning: Spinning | None) -> None:
            ready = poll.poll(READ_TICK_S * 1e3) if spinning is None else _spin(poll, spinning)
            for fd, _ in ready:
                peer, link = by_fd[fd]
                # A session without a connection always polls as ready, without data.
                self._agent.receiver.read(peer, link, may_block=link.is_broken)

        return read


def _spin(poll: select.poll, spinning: Spinning) -> list[tuple[int, int]]:
    began_s = time.monotonic()
    while not (ready := poll.poll(0)):
        spun_s = time.monotonic() - began_s
        if spun_s > spinning.spin_s:
            spinning.failed(spun_s)
            return []
    spinning.succeeded()
    return ready


def _is_any_lost(reading: Reading) -> bool:
    return any(peer.lost is not None for peer, _ in reading)
