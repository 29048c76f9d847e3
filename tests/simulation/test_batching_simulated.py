"""Batches under random arrivals, delays of turns, cancellations and run times, in virtual time."""

from __future__ import annotations

import random

import pytest

from tests.simulation.seeds import batches, name_of, try_seeds
from tests.simulation.timeline import Timeline
from torchweft.rpc.batching import LAST, NOTHING, SOON, Batcher, Request

_LATE_S = 1e-9


class World(Timeline):
    """One queue, its callers and its shell, which gives turns late and sometimes twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = chance = random.Random(seed)
        self.largest = chance.choice((1, 2, 5, 16))
        self.smallest = chance.randint(1, self.largest)
        self.longest_wait_s = chance.choice((0.0, 0.01, 1.0))
        self.machine = Batcher(self.largest, self.smallest, self.longest_wait_s)
        self.calls = chance.randint(1, 60)
        self.gap_s = chance.choice((0.0, 0.001, 0.1, 2.0))
        self.turn_delay_s = chance.choice((0.0, 0.001, 0.05))
        self.run_s = chance.choice((0.0, 0.001, 0.5))
        self.waiting: dict[int, float] = {}
        self.outcomes: dict[int, str] = {}
        self.running: list[int] = []
        self.idle_since_s = 0.0
        self.watched_s: float | None = None
        self.trace: list[object] = []

    def run(self) -> None:
        at_s = 0.0
        for number in range(self.calls):
            at_s += self.chance.expovariate(1.0) * self.gap_s
            self.later(at_s, self.arrive, number)
        while self.step():
            self.check()
        assert set(self.outcomes) == set(range(self.calls)), "every call has an outcome"
        assert not len(self.machine)

    def arrive(self, number: int) -> None:
        request = self.machine.arrived(number, self.now_s)
        self.trace.append((self.now_s, "arrived", number, request))
        self.waiting[number] = self.now_s
        self.carry_out(request)
        if self.chance.random() < 0.1:
            self.later(self.chance.random() * 0.1, self.leave, number)

    def leave(self, number: int) -> None:
        assert self.machine.left(number) == (number in self.waiting)
        if self.waiting.pop(number, None) is not None:
            self.end(number, "left")

    def carry_out(self, request: Request) -> None:
        assert request in (NOTHING, SOON, LAST)
        if request is not NOTHING:
            for _ in range(self.chance.choice((1, 1, 1, 2))):
                # A last turn waits for the messages that are there, for as long as more come.
                factor = 10 if request is LAST else 1
                self.later(self.chance.random() * factor * self.turn_delay_s, self.turn)
        wake_s = self.machine.wake_s
        if wake_s < float("inf") and self.watched_s is None:
            self.watched_s = wake_s
            self.later(max(wake_s - self.now_s, 0.0), self.wake)

    def wake(self) -> None:
        self.watched_s = None
        self.carry_out(self.machine.woken(self.now_s))

    def turn(self) -> None:
        numbers = self.machine.turn(self.now_s)
        if not numbers:
            self.carry_out(NOTHING)
            return
        self.trace.append((self.now_s, "batch", numbers))
        assert not self.running, "one batch runs at a time"
        assert numbers == list(self.waiting)[: self.largest], "in the order of arrival"
        first_s = self.waiting[numbers[0]]
        is_late = self.now_s >= first_s + self.longest_wait_s
        assert is_late or len(self.waiting) >= self.smallest
        due_s = max(first_s + self.longest_wait_s, self.idle_since_s)
        assert self.now_s <= due_s + 10 * self.turn_delay_s + _LATE_S, "no call waits longer"
        for number in numbers:
            del self.waiting[number]
        self.running = numbers
        self.later(self.chance.random() * self.run_s, self.finish)

    def finish(self) -> None:
        for number in self.running:
            self.end(number, "answered")
        self.running = []
        self.idle_since_s = self.now_s
        self.carry_out(self.machine.ended(self.now_s))

    def end(self, number: int, how: str) -> None:
        assert number not in self.outcomes, "one outcome"
        self.outcomes[number] = how

    def check(self) -> None:
        assert len(self.machine) == len(self.waiting)
        assert self.machine.is_running == bool(self.running)


@pytest.mark.parametrize("batch", batches(2000), ids=name_of)
def test_every_call_has_one_outcome_in_time(batch: range) -> None:
    try_seeds(batch, World, World.run, lambda world: world.trace)
