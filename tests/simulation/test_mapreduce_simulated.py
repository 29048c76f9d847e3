"""The schedule of maps over workers that die at any moment, with parts that take any time.

Each seed is a map: some workers, parts of random lengths given to them, a tree or none, and deaths.
The caller learns of a death a while later; until then, parts there do not answer. A part fails if
the object of its worker was still on its way from a dead worker. ``WEFT_TEST_SEED=<seed>`` runs one
seed alone and prints its trace; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.mapreduce.schedule import (
    Action,
    Begin,
    Cancel,
    Complete,
    Fail,
    Make,
    Moved,
    Schedule,
    Start,
)


class Attempt(NamedTuple):
    part: int
    worker: int
    path: tuple[int, ...]


class World:
    """A map, its workers, and a clock."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        workers = list(range(chance.randint(1, 12)))
        homes = [chance.choice(workers) for _ in range(chance.choice((0, 1, 3, 10, 40)))]
        self.concurrency = chance.choice((1, 1, 2, 5))
        self.is_recorded = chance.random() < 0.6
        self.may_rerun = chance.random() < 0.9
        self.here = 0 if chance.random() < 0.3 else None
        self.keepers = set(workers) if chance.random() < 0.7 else set()
        self.schedule = Schedule(
            homes,
            workers,
            concurrency=self.concurrency,
            balance=chance.random() < 0.5,
            may_rerun=self.may_rerun,
            is_recorded=self.is_recorded,
            fan_out=chance.choice((0, 1, 2, 4)),
            here=self.here,
            keepers=self.keepers,
        )
        self.slowness = {worker: chance.choice((0.1, 1.0, 1.0, 20.0)) for worker in workers}
        self.parts = len(homes)
        self.now_s = 0.0
        self.trace: list[object] = []
        self.alive = set(workers)
        self.known_lost: set[int] = set()
        self.objects: dict[int, tuple[tuple[int, ...], float]] = {}
        self.running: dict[tuple[int, int], Attempt] = {}
        self.attempts: Counter[int] = Counter()
        self.results: dict[int, tuple[Attempt, bool]] = {}
        self.outcome: Action | None = None
        self.known_at_end: set[int] = set()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._counter = itertools.count()
        mortal = [worker for worker in workers if worker != self.here]
        for worker in chance.sample(mortal, chance.randint(0, len(mortal))):
            if chance.random() < 0.7:
                self.after(chance.expovariate(0.2), self.die, worker)

    def after(self, delay_s: float, event: Callable[..., None], *arguments: Any) -> None:
        entry = (self.now_s + delay_s, next(self._counter), event, arguments)
        heapq.heappush(self._events, entry)

    def run(self) -> None:
        if self.chance.random() < 0.2:
            self.now_s = 3.0  # Some workers are dead before the map begins.
        self._run_until(self.now_s)
        self.note_losses()
        if not self.schedule.is_over:
            self.carry_out("begin", self.schedule.begin())
        self._run_until(float("inf"))
        self.check_end()

    def _run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            at_s, _, event, arguments = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            event(*arguments)

    # Events

    def die(self, worker: int) -> None:
        self.trace.append((self.now_s, "dies", worker))
        self.alive.discard(worker)
        self.after(self.chance.choice((0.0, 0.5, 5.0)), self.become_known, worker)

    def become_known(self, worker: int) -> None:
        """Makes the loss known to the caller, which fails its calls there in any order."""
        self.known_lost.add(worker)
        failing = [key for key, attempt in self.running.items() if attempt.worker == worker]
        self.chance.shuffle(failing)
        for key in failing:
            self.after(self.chance.choice((0.0, 0.1)), self.fail, key, worker)

    def end(self, key: tuple[int, int]) -> None:
        attempt = self.running.get(key)
        if attempt is None or attempt.worker not in self.alive:
            return
        self.note_losses()
        if self.schedule.is_current(*key):
            del self.running[key]
            has_graph = self.chance.random() < 0.8
            self.results[attempt.part] = attempt, has_graph and self.is_recorded
            self.carry_out("ended", self.schedule.ended(*key, has_graph))

    def fail(self, key: tuple[int, int], lost: int) -> None:
        if self.running.pop(key, None) is not None:
            self.carry_out("failed", self.schedule.failed(*key, lost))
        self.note_losses()

    def note_losses(self) -> None:
        for worker in self.schedule.workers:
            if worker in self.known_lost:
                self.carry_out("lost", self.schedule.lost(worker))

    # Actions of the schedule

    def carry_out(self, event: str, actions: Iterable[Action]) -> None:
        actions = list(actions)
        self.trace.append((self.now_s, event, actions))
        for action in actions:
            assert self.outcome is None, "nothing follows the end"
            if isinstance(action, Make):
                self.make(action)
            elif isinstance(action, Start):
                self.start(action)
            elif isinstance(action, Begin):
                self.begin(action.part, action.attempt)
            elif isinstance(action, Cancel):
                self.running.pop((action.part, action.attempt), None)
            elif isinstance(action, Moved):
                assert action.to_worker not in self.known_lost
            elif isinstance(action, (Complete, Fail)):
                self.outcome = action
                self.known_at_end = self.known_lost.copy()

    def make(self, action: Make) -> None:
        path: tuple[int, ...] = ()
        ready_s = self.now_s
        if action.parent is not None:
            path, ready_s = self.objects[action.parent]
            path = (*path, action.parent)
        self.objects[action.worker] = path, ready_s + self.chance.expovariate(1.0)

    def start(self, action: Start) -> None:
        self.attempts[action.part] += 1
        assert action.attempt == self.attempts[action.part]
        assert action.part not in [attempt.part for attempt in self.running.values()]
        path, _ = self.objects[action.worker]
        key = action.part, action.attempt
        self.running[key] = Attempt(action.part, action.worker, path)
        busy = Counter(attempt.worker for attempt in self.running.values())
        assert action.is_ahead == (busy[action.worker] > self.concurrency)
        assert busy[action.worker] <= self.concurrency + (action.worker in self.keepers)
        if action.worker in self.known_lost:
            self.after(0.0, self.fail, key, action.worker)
        elif not action.is_ahead:
            self.begin(*key)

    def begin(self, part: int, attempt: int) -> None:
        key = part, attempt
        started = self.running.get(key)
        if started is None:
            return
        _, ready_s = self.objects[started.worker]
        length_s = self.slowness[started.worker] * self.chance.expovariate(1.0)
        self.after(max(ready_s - self.now_s, 0.0), self.find_object, key, ready_s, length_s)

    def find_object(self, key: tuple[int, int], ready_s: float, length_s: float) -> None:
        """Fails a part whose object was still on its way from a dead worker."""
        attempt = self.running.get(key)
        if attempt is None:
            return
        broken = [worker for worker in attempt.path if worker not in self.alive]
        if broken and ready_s >= self.now_s:
            self.fail(key, broken[-1])
        else:
            self.after(length_s, self.end, key)

    # Checks at the end

    def check_end(self) -> None:
        assert self.outcome is not None, "it ends"
        if isinstance(self.outcome, Fail):
            assert self.outcome.worker is not None or not self.may_rerun
            assert not self.may_rerun or not self.alive
            return
        assert sorted(self.results) == list(range(self.parts))
        for attempt, has_graph in self.results.values():
            assert not has_graph or not {attempt.worker, *attempt.path} & self.known_at_end
        assert not self.running


@pytest.mark.parametrize("batch", batches(2000), ids=name_of)
def test_every_part_has_one_valid_result_in_the_end(batch: range) -> None:
    try_seeds(batch, World, World.run, lambda world: world.trace)
