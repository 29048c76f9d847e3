"""Tests the simulated byte streams: with a network that is too kind, no simulation proves much."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.simulation.streams import End, Streams, Weather
from tests.simulation.timeline import Timeline

DATA = bytes(range(250))


class Pair:
    """A connection from place 1 to place 2."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.timeline = Timeline()
        self.streams = Streams(random.Random(seed), self.timeline, weather)
        self.accepted: list[End] = []
        self.opened: list[End] = []
        self.refusals = 0
        self.pieces: list[bytes] = []
        self.told: list[int] = []
        self.streams.listen(2, self._accept)
        self.streams.dial(1, 2, self._open, self._refuse)
        self.timeline.run_for(1.0)

    def _accept(self, end: End) -> None:
        self.accepted.append(end)
        end.on_bytes = self.pieces.append
        end.on_broken = lambda: self.told.append(2)

    def _open(self, end: End) -> None:
        self.opened.append(end)
        end.on_broken = lambda: self.told.append(1)

    def _refuse(self) -> None:
        self.refusals += 1

    @property
    def received(self) -> bytes:
        return b"".join(self.pieces)


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_in_order_and_in_pieces(seed: int) -> None:
    pair = Pair(seed, Weather(largest_piece_bytes=40))
    assert pair.opened[0].write(DATA) == len(DATA)
    pair.timeline.run_for(10.0)
    assert pair.received == DATA
    assert len(pair.pieces) > 5


def test_no_more_is_taken_than_the_window_and_room_is_told() -> None:
    pair = Pair(0, Weather(window_bytes=100))
    (end,) = pair.opened
    rooms: list[None] = []
    end.on_room = lambda: rooms.append(None)
    assert end.write(DATA) == 100
    assert end.write(DATA) == 0
    pair.timeline.run_for(10.0)
    assert rooms
    assert end.write(DATA) == 100


@pytest.mark.parametrize("seed", range(5))
def test_what_is_under_way_when_a_connection_breaks_is_lost(seed: int) -> None:
    pair = Pair(seed, Weather(largest_piece_bytes=40, breaks=0.5))
    pair.opened[0].write(DATA)
    pair.timeline.run_for(10.0)
    assert pair.received == DATA[: len(pair.received)]
    assert 0 < len(pair.received) < len(DATA)
    assert sorted(pair.told) == [1, 2]


def test_who_is_not_told_of_a_break_learns_of_it_when_it_writes_or_probes() -> None:
    learnings: list[Callable[[End], object]] = [lambda end: end.write(DATA), End.probe]
    for learn in learnings:
        pair = Pair(0, Weather(deafness=1.0))
        pair.streams.break_connection(pair.opened[0])
        pair.timeline.run_for(10.0)
        assert pair.told == []
        learn(pair.opened[0])
        pair.timeline.run_for(10.0)
        assert pair.told == [1]


def test_what_waits_at_a_cut_goes_on_when_it_heals() -> None:
    pair = Pair(0, Weather())
    (end,) = pair.opened
    pair.streams.cut(1, 2)
    end.write(DATA)
    heard_s = end.heard_s
    end.probe()
    pair.timeline.run_for(100.0)
    assert (pair.received, end.heard_s) == (b"", heard_s)
    pair.streams.heal()
    pair.timeline.run_for(10.0)
    assert pair.received == DATA
    assert end.heard_s > 100.0


def test_a_swallowed_connection_says_nothing_and_another_one_is_fine() -> None:
    pair = Pair(0, Weather())
    pair.streams.swallow_any()
    pair.opened[0].write(DATA)
    pair.opened[0].probe()
    pair.timeline.run_for(1000.0)
    assert (pair.received, pair.told) == (b"", [])
    pair.streams.dial(1, 2, pair._open, pair._refuse)
    pair.timeline.run_for(1.0)
    pair.opened[1].write(DATA)
    pair.timeline.run_for(10.0)
    assert pair.received == DATA


def test_a_frozen_worker_reads_nothing_but_its_system_answers() -> None:
    pair = Pair(0, Weather())
    pair.streams.freeze(2, 50.0)
    pair.opened[0].write(DATA)
    pair.timeline.run_for(40.0)
    assert pair.received == b""
    pair.opened[0].probe()
    pair.timeline.run_for(5.0)
    assert pair.opened[0].heard_s > 40.0
    pair.timeline.run_for(10.0)
    assert pair.received == DATA


def test_a_process_that_dies_is_heard_of_and_a_host_that_dies_is_not() -> None:
    alone, with_host = Pair(0, Weather()), Pair(0, Weather())
    for pair in (alone, with_host):
        pair.streams.kill(2, is_silent=pair is with_host)
        pair.opened[0].probe()
        pair.streams.dial(1, 2, pair._open, pair._refuse)
        pair.timeline.run_for(100.0)
    assert (alone.told, alone.refusals) == ([1], 1)
    assert (with_host.told, with_host.refusals) == ([], 0)
    with_host.streams.listen(2, with_host._accept)
    with_host.opened[0].probe()
    with_host.timeline.run_for(10.0)
    assert with_host.told == [1]
