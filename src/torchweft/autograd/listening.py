"""Lets the thread that leads a backward pass read the connections itself while it waits.

A thread that is woken by another thread, which the kernel woke, waits for two wake-ups. So the
leading thread takes over the connections of all workers that may send to it, before it sends
anything itself. It returns them before it runs a graph, which may take long. If another thread of
this worker already reads one of them, or there are many, other threads wake the leading thread.

The main thread may be interrupted at any step; see ``runtime.interrupts``. It takes only messages
of its own pass, and another thread reads everything else. An interrupt ends the pass. So it does no
harm if another thread reads a message once more that the main thread had taken.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Sequence
from itertools import repeat

from torchweft.agent.agent import Agent
from torchweft.agent.calls import READING, MainReader
from torchweft.agent.open_calls import WAITING
from torchweft.agent.peers import Peer
from torchweft.autograd.codec import CONTEXT_AT
from torchweft.autograd.pass_state import LedPassState
from torchweft.errors import ProtocolError
from torchweft.transport.link import READ_TICK_S, Link
from torchweft.transport.spinning import Spinning
from torchweft.wire.frames import Frame

Reading = list[tuple[Peer, Link]]
OwnReading = list[tuple[Peer, Link, MainReader]]

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
        if len(peers) > _MOST_READ:
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

    def lead_in_main(
        self,
        peers: Sequence[Peer],
        send: Callable[[], None],
        led: LedPassState,
    ) -> None:
        """Sends, and reads messages of a pass in the main thread until there is one.

        Returns without a message if another thread reads one of the connections, or has to.

        Args:
            peers: The workers that may send to this one.
            send: Sends this worker's messages.
            led: The pass, which gets the messages.
        """
        agent = self._agent
        held: OwnReading = []
        try:
            for peer in peers[: _MOST_READ + 1]:
                link = peer.link
                if link is None or not link.may_be_interrupted or link.is_free:
                    break
                reader = MainReader(READING)
                reader.owner = led
                held.append((peer, link, reader))
                if link.readers.setdefault(0, reader) is not reader:
                    agent.receiver.take_from_interrupted(peer, link)
                    held.pop()
                    break
                link.taken_by = reader
                agent.reactor.pause_reading(link.read_fd)
            send()
            if 0 < len(held) == len(peers) <= _MOST_READ and led.outcome is None:
                self._read_own(held, led)
        finally:
            for peer, link, reader in held:
                agent.receiver.give_back(peer, link, reader)
            for peer in peers:
                if peer.link is not None:
                    peer.link.wake_writer()

    def _read_own(self, held: OwnReading, led: LedPassState) -> None:
        """Reads until there is a message of the pass, or a message for another thread."""
        is_only = len(held) == 1
        inbox, deadline_s = led.inbox, led.deadline_s()
        spinning = self._spinning_of(held[0][0])
        look = spinning.begin() if spinning.is_worthwhile() else None
        if self._agent.reactor.unarmed:
            self._agent.reactor.arm_unarmed()
        poll = None
        while not inbox:
            for peer, link, reader in held:
                frames = link.receive_own(reader, may_block=look is None and is_only)
                if frames:
                    if not self._belong(peer, frames, led):
                        return  # The next reader handles all of them.
                    consumed: list[int] = []
                    inbox.extend(zip(repeat(peer), frames))
                    link.end_own(frames, reader, consumed)
                    if not consumed:  # A signal handler took the link: another thread reads them.
                        for frame in frames:
                            inbox.remove((peer, frame))
                        return
                elif frames is None or peer.lost is not None:
                    return
            if look is not None:
                if inbox:
                    spinning.succeeded()
                elif not look.goes_on():
                    look = None
            elif not (inbox or is_only):
                poll = poll or _poll_of([(peer, link) for peer, link, _ in held])
                poll.poll(READ_TICK_S * 1e3)
            if not inbox and time.monotonic() > deadline_s:
                return

    def _belong(self, peer: Peer, frames: Sequence[Frame], led: LedPassState) -> bool:
        """Whether all of ``frames`` are messages of the pass, to which ``peer`` is entitled."""
        context = led.name.context_id.to_bytes(8, "little")
        try:
            for each in frames:
                if each.id != led.pass_id or each.kind not in CONTEXT_AT:
                    return False
                self._agent.receiver.check(peer, each)
                at = CONTEXT_AT[each.kind]
                if each.control[at : at + 8] != context:
                    return False
        except ProtocolError:
            return False
        return True

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
        poll = _poll_of(reading)
        by_fd = {link.read_fd: (peer, link) for peer, link in reading}

        def read(spinning: Spinning | None) -> None:
            ready = poll.poll(READ_TICK_S * 1e3) if spinning is None else _spin(poll, spinning)
            for fd, _ in ready:
                peer, link = by_fd[fd]
                # A session without a connection always polls as ready, without data.
                self._agent.receiver.read(peer, link, may_block=link.is_broken)

        return read


def _poll_of(reading: Reading) -> select.poll:
    poll = select.poll()
    for _, link in reading:
        poll.register(link.read_fd, select.POLLIN)
    return poll


def _spin(poll: select.poll, spinning: Spinning) -> list[tuple[int, int]]:
    look = spinning.begin()
    while not (ready := poll.poll(0)):
        if not look.goes_on():
            return []
    spinning.succeeded()
    return ready


def _is_any_lost(reading: Reading) -> bool:
    return any(peer.lost is not None for peer, _ in reading)


WAITING.add(Listener.lead_in_main.__code__)
