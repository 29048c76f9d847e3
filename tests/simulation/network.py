"""Networks for protocols under test: one with faults and virtual time, one that a test steers.

Both know two kinds of packets. An unprotected packet, which its protocol repeats, may be lost. A
*reliable* packet stands for a message that a session below retransmits until it arrives. It may
come late, out of order and more than once, but it comes, unless its receiver is killed. A packet
from a worker to itself comes exactly once.

A run is a function of its seed: all choices come from one ``random.Random``, and no clock, hash
order or thread affects them.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Packet(NamedTuple):
    """A message in flight."""

    source: int
    target: int
    payload: Any
    is_reliable: bool


class Sender(Protocol):
    """The part of a network that workers under test need."""

    def send(self, source: int, target: int, payload: Any, *, is_reliable: bool = False) -> None:
        """Puts a packet on its way."""


@dataclass(frozen=True)
class Faults:
    """How bad a network is: probabilities for each packet, and delays in seconds.

    Most delays are short and a few very long, so a packet may come after whole conversations.
    """

    loss: float = 0.0
    duplication: float = 0.0
    shortest_delay_s: float = 0.001
    longest_delay_s: float = 1.0

    @classmethod
    def draw(cls, chance: random.Random) -> Faults:
        """Draws a network between a perfect and a terrible one."""
        return cls(
            loss=chance.choice((0.0, 0.1, 0.4)),
            duplication=chance.choice((0.0, 0.2, 0.5)),
            longest_delay_s=chance.choice((0.01, 1.0, 5.0)),
        )


class Network:
    """Delivers packets in virtual time, with faults."""

    def __init__(self, chance: random.Random, faults: Faults) -> None:
        self.now_s = 0.0
        self.faults = faults
        self._chance = chance
        self._queue: list[tuple[float, int, Packet]] = []
        self._count = 0
        self._cut: set[frozenset[int]] = set()
        self._killed: set[int] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def send(self, source: int, target: int, payload: Any, *, is_reliable: bool = False) -> None:
        packet = Packet(source, target, payload, is_reliable)
        if source == target:
            self._enqueue(packet)
            return
        if is_reliable or self._chance.random() >= self.faults.loss:
            self._enqueue(packet)
        if self._chance.random() < self.faults.duplication:
            self._enqueue(packet)

    def deliver(self) -> Packet | None:
        """Advances the time to the next packet that arrives; returns None if none is in flight."""
        while self._queue:
            at_s, _, packet = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, at_s)
            if packet.target in self._killed:
                continue
            if frozenset((packet.source, packet.target)) not in self._cut:
                return packet
            if packet.is_reliable:
                self._enqueue(packet)
                # Time advances only with arrivals, so leave the loop: the test decides when to
                # heal the cut.
                return None
        return None

    def cut(self, one: int, other: int) -> None:
        """Lets nothing through between two workers until ``heal``."""
        self._cut.add(frozenset((one, other)))

    def heal(self) -> None:
        """Ends all cuts."""
        self._cut.clear()

    def kill(self, worker: int) -> None:
        """Delivers nothing to ``worker`` any more; its own packets still arrive."""
        self._killed.add(worker)

    def _enqueue(self, packet: Packet) -> None:
        faults = self.faults
        span_s = faults.longest_delay_s - faults.shortest_delay_s
        delay_s = faults.shortest_delay_s + span_s * self._chance.random() ** 4
        self._count += 1  # breaks ties, for payloads have no order
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, packet))


class SteeredNetwork:
    """Lets the test decide which packet arrives next, is lost or is sent twice."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []

    def send(self, source: int, target: int, payload: Any, *, is_reliable: bool = False) -> None:
        self.packets.append(Packet(source, target, payload, is_reliable))

    def take(self, choice: int) -> Packet:
        """Takes one packet from the network; any number is a valid choice."""
        return self.packets.pop(choice % len(self.packets))

    def lose(self, choice: int) -> None:
        """Loses one packet that may be lost, if there is one."""
        self._change(choice, lambda p: not p.is_reliable, self.packets.remove)

    def duplicate(self, choice: int) -> None:
        """Sends one packet again, but none from a worker to itself."""
        self._change(choice, lambda p: p.source != p.target, self.packets.append)

    def _change(
        self, choice: int, is_meant: Callable[[Packet], bool], change: Callable[[Packet], None]
    ) -> None:
        meant = [packet for packet in self.packets if is_meant(packet)]
        if meant:
            change(meant[choice % len(meant)])
