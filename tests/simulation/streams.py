"""A simulated network of byte streams, with the guarantees and the faults of TCP.

Bytes of a connection arrive in order, in pieces of any size, and only while the network lets them
through. A connection may end at any byte. Bytes in flight are lost then, and each end learns of
the end early, late, when it writes, or never. The network takes a limited number of bytes from a
writer that the reader's host has not confirmed. A *cut* stops one direction or both between two
places; bytes that wait there continue when it heals.

If a process dies, its host ends its connections. If a host dies, it says nothing, and its peers
hear nothing until there is a host again at that place.

All choices come from one ``random.Random``; time is virtual.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.timeline import Timeline


@dataclass(frozen=True)
class Weather:
    """How bad a network is.

    Attributes:
        longest_delay_s: Longest delay of a piece; most are far shorter.
        largest_piece_bytes: Largest piece that arrives at once.
        window_bytes: How many unconfirmed bytes a connection takes.
        breaks: Probability, for each piece, that its connection breaks after it.
        deafness: Probability, for each end of a connection that breaks, that it is not told.
        misses: Probability that an attempt to connect gets no answer. The next one between the same
            places gets through, unless there is a cut.
    """

    longest_delay_s: float = 0.1
    largest_piece_bytes: int = 100
    window_bytes: int = 1000
    breaks: float = 0.0
    deafness: float = 0.0
    misses: float = 0.0

    @classmethod
    def draw(cls, chance: random.Random) -> Weather:
        """Draws a network between a perfect and a terrible one."""
        return cls(
            longest_delay_s=chance.choice((0.001, 0.05, 0.5)),
            largest_piece_bytes=chance.choice((3, 40, 300, 5000)),
            window_bytes=chance.choice((50, 700, 20_000)),
            breaks=chance.choice((0.0, 0.01, 0.05)),
            deafness=chance.choice((0.0, 0.5, 1.0)),
            misses=chance.choice((0.0, 0.3)),
        )

    def calmed(self) -> Weather:
        """Returns the same network without faults and with short delays."""
        return Weather(min(self.longest_delay_s, 0.01), 5000, self.window_bytes)


class End:
    """One end of a connection: the worker's socket.

    Attributes:
        on_bytes: Called with received bytes.
        on_room: Called when there is room again after ``write`` took fewer bytes than given.
        on_broken: Called once, when this end learns that the connection has ended.
        heard_s: The true time of the last sign of life from the other end's host.
    """

    other: End

    def __init__(self, streams: Streams, place: int, peer_place: int) -> None:
        self._streams = streams
        self.place = place
        self.peer_place = peer_place
        self.on_bytes: Callable[[bytes], None] = _ignore
        self.on_room: Callable[[], None] = _ignore
        self.on_broken: Callable[[], None] = _ignore
        self.heard_s = streams.timeline.now_s
        self.is_open = True
        self.is_carrying = True
        self.is_swallowed = False
        self.is_pumping = False
        self.is_wanting_room = False
        self.is_ending = False
        self.under_way = bytearray()
        self.unconfirmed = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes as much of ``data`` as the network takes; returns the number of bytes."""
        assert self.is_open, "a closed end is written to"
        room = self._streams.weather.window_bytes - self.unconfirmed
        size = max(0, min(room, len(data)))
        self.is_wanting_room = size < len(data)
        self.under_way += data[:size]
        self.unconfirmed += size
        self._streams.pump_later(self)
        return size

    def close(self) -> None:
        """Ends the connection from this side; written bytes may still arrive."""
        if self.is_open:
            self._let_go()
            self.is_ending = True
            self._streams.pump_later(self)

    def probe(self) -> None:
        """Sends a keepalive from host to host; the answer sets ``heard_s``."""
        self._streams.probe(self)

    def told(self) -> None:
        """Tells this end that the connection has ended."""
        if self.is_open:
            on_broken = self.on_broken
            self._let_go()
            on_broken()

    def _let_go(self) -> None:
        """Detaches the worker: after it closed or heard of the end, it gets no more callbacks."""
        self.is_open = False
        self.on_bytes = self.on_room = self.on_broken = _ignore


def _ignore(*_: object) -> None:
    """Does nothing."""


class Streams:
    """The network: places, and connections between them."""

    def __init__(self, chance: random.Random, timeline: Timeline, weather: Weather) -> None:
        self.chance = chance
        self.timeline = timeline
        self.weather = weather
        self.breaks = 0
        self._listeners: dict[int, Callable[[End], None]] = {}
        self._ends: dict[int, list[End]] = {}
        self._dead_hosts: set[int] = set()
        self._frozen_until_s: dict[int, float] = {}
        self._cut: set[tuple[int, int]] = set()
        self._walls: set[tuple[int, int]] = set()
        self._waiting: list[Callable[[], None]] = []
        self._missed: set[tuple[int, int]] = set()
        """The source and target of each latest attempt to connect that got no answer."""

    # Operations of workers

    def listen(self, place: int, on_accept: Callable[[End], None]) -> None:
        """Calls ``on_accept`` with every connection to ``place``; there is a host again."""
        self._listeners[place] = on_accept
        self._dead_hosts.discard(place)

    def dial(
        self,
        place: int,
        target: int,
        on_open: Callable[[End], None],
        on_refused: Callable[[], None],
    ) -> None:
        """Opens a connection; calls one of the two functions, or none."""
        way = place, target
        if not self._is_heard(*way) or way in self._walls:
            return
        if self.chance.random() < self.weather.misses and way not in self._missed:
            self._missed.add(way)
        else:
            self._missed.discard(way)
            self.timeline.later(self.delay_s(), self._accept, place, target, on_open, on_refused)

    # Operations of the world

    def cut(self, source: int, target: int) -> None:
        """Lets nothing through from ``source`` to ``target`` until ``heal``."""
        self._cut.add((source, target))

    def wall(self, source: int, target: int) -> None:
        """Drops all attempts to connect from ``source`` to ``target``, permanently."""
        self._walls.add((source, target))

    def heal(self) -> None:
        """Ends all cuts; waiting bytes continue."""
        self._cut.clear()
        self._go_on()

    def calm(self) -> None:
        """Ends all cuts; no connection breaks by itself any more."""
        self.weather = self.weather.calmed()
        self.heal()

    def kill(self, place: int, is_silent: bool) -> None:
        """Ends the worker at ``place``, and its host if ``is_silent``."""
        self._listeners.pop(place, None)
        self._frozen_until_s.pop(place, None)
        if is_silent:
            self._dead_hosts.add(place)
        for end in self._ends.pop(place, []):
            if is_silent:
                end._let_go()
                end.is_carrying = False
                end.under_way.clear()
            else:
                end.close()

    def freeze(self, place: int, span_s: float) -> None:
        """Stops the worker at ``place`` from reading for a while; its host continues."""
        until_s = self.timeline.now_s + span_s
        self._frozen_until_s[place] = max(until_s, self._frozen_until_s.get(place, 0.0))

    def break_connection(self, end: End) -> None:
        """Breaks a connection; bytes in flight are lost."""
        self.breaks += 1
        for one in (end, end.other):
            one.is_carrying = False
            one.under_way.clear()
            if self.chance.random() >= self.weather.deafness:
                self.timeline.later(self.delay_s(), one.told)

    def swallow_any(self) -> None:
        """Silently stops one connection for good; new connections work.

        A router that has forgotten a connection does the same.
        """
        carrying = [end for ends in self._ends.values() for end in ends if end.is_carrying]
        if carrying:
            end = self.chance.choice(carrying)
            end.is_swallowed = end.other.is_swallowed = True

    def break_any(self) -> None:
        """Breaks a random connection, if there is one."""
        carrying = [end for ends in self._ends.values() for end in ends if end.is_carrying]
        if carrying:
            self.break_connection(self.chance.choice(carrying))

    def delay_s(self) -> float:
        """Draws a delay, which is seldom long."""
        return 1e-5 + self.weather.longest_delay_s * self.chance.random() ** 4

    # How bytes travel

    def pump_later(self, end: End) -> None:
        """Schedules the arrival of the next piece of the bytes in flight."""
        if not end.is_pumping:
            end.is_pumping = True
            self.timeline.later(self.delay_s(), self._pump, end)

    def probe(self, end: End) -> None:
        if self._is_heard(end.place, end.peer_place) and not end.is_swallowed:
            self.timeline.later(self.delay_s(), self._answer_probe, end)

    def _accept(
        self,
        place: int,
        target: int,
        on_open: Callable[[End], None],
        on_refused: Callable[[], None],
    ) -> None:
        if not self._is_heard(target, place):
            return
        if target not in self._listeners:
            self.timeline.later(self.delay_s(), on_refused)
            return
        here, there = End(self, place, target), End(self, target, place)
        here.other, there.other = there, here
        for end in (here, there):
            mine = self._ends.setdefault(end.place, [])
            mine[:] = [other for other in mine if other.is_open]
            mine.append(end)
        # The host takes the connection even if its worker is frozen.
        open_s = self.delay_s()
        self.timeline.later(open_s, on_open, here)
        self.timeline.later(max(self._frozen_s(target), open_s), self._hand_over, there)

    def _hand_over(self, end: End) -> None:
        listener = self._listeners.get(end.place)
        if end.is_open and listener is not None:
            listener(end)

    def _frozen_s(self, place: int) -> float:
        return max(0.0, self._frozen_until_s.get(place, 0.0) - self.timeline.now_s)

    def _is_heard(self, source: int, target: int) -> bool:
        return (source, target) not in self._cut and not ({source, target} & self._dead_hosts)

    def _pump(self, end: End) -> None:
        end.is_pumping = False
        if not end.is_carrying:
            # The other host does not know this connection any more.
            self._reset(end)
            return
        if end.is_swallowed:
            return
        if not self._is_heard(end.place, end.peer_place):
            end.is_pumping = True
            self._waiting.append(lambda: self._pump(end))
            return
        frozen_s = self._frozen_s(end.peer_place)
        if frozen_s:
            end.is_pumping = True
            self.timeline.later(frozen_s, self._pump, end)
            return
        self._deliver_piece(end)
        if end.under_way or (end.is_ending and end.is_carrying):
            self.pump_later(end)

    def _deliver_piece(self, end: End) -> None:
        there = end.other
        if not there.is_open:
            end.is_carrying = there.is_carrying = False
            end.under_way.clear()
            self._reset(end)
            return
        there.heard_s = self.timeline.now_s
        if not end.under_way:
            if end.is_ending:
                end.is_carrying = there.is_carrying = False
                there.under_way.clear()
                there.told()
            return
        size = self.chance.randint(1, self.weather.largest_piece_bytes)
        piece = bytes(end.under_way[:size])
        del end.under_way[:size]
        self.timeline.later(self.delay_s(), self._confirm, end, len(piece))
        there.on_bytes(piece)
        if end.is_carrying and self.chance.random() < self.weather.breaks:
            self.break_connection(end)

    def _confirm(self, end: End, size: int) -> None:
        """Tells the writer that the other end's host has some bytes."""
        if not self._is_heard(end.peer_place, end.place):
            self._waiting.append(lambda: self._confirm(end, size))
            return
        end.unconfirmed -= size
        if not end.is_carrying:
            return
        end.heard_s = self.timeline.now_s
        if end.is_wanting_room:
            end.is_wanting_room = False
            end.on_room()

    def _answer_probe(self, end: End) -> None:
        if end.is_carrying:
            end.other.heard_s = self.timeline.now_s  # A keepalive is a sign of life, too.
        if not self._is_heard(end.peer_place, end.place):
            return
        if not end.is_carrying or not end.other.is_open:
            self._reset(end)
        else:
            self.timeline.later(self.delay_s(), self._hear, end)

    def _hear(self, end: End) -> None:
        if end.is_carrying:
            end.heard_s = self.timeline.now_s

    def _reset(self, end: End) -> None:
        if end.is_open and self._is_heard(end.peer_place, end.place):
            self.timeline.later(self.delay_s(), end.told)

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()
