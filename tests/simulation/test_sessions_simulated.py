"""Sessions over thousands of networks whose connections break at any byte.

Each seed is some workers that call each other, and a network: pieces of any size, connections that
break and tell one end, both or none, connections that cannot be made, cuts in one direction or in
both, workers that are frozen for a while, clocks that are wrong. ``WEFT_TEST_SEED=<seed>`` runs one
seed alone and prints its trace; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.simulation.connections import Limits
from tests.simulation.counter_world import CounterWorld
from tests.simulation.seeds import batches, name_of, try_seeds
from tests.simulation.streams import Weather
from torchweft.engine.wire import session

THRESHOLDS = (50, 300, 2000, 1 << 16)
OUTAGE_S = 4.0
"""Shorter than the time after which a worker suspects that a peer is lost."""
PAUSE_S = 2.0
"""The pause between two outages, in which all workers hear from each other."""
LIMITS = Limits(detection_s=10.0, reconnect_s=60.0, connect_s=60.0)
LONGEST_FREEZE_S = 100.0
END_S = 600.0


@pytest.fixture(autouse=True)
def _restore_threshold() -> Iterator[None]:
    before = session.ACKNOWLEDGE_BYTES, session.ALONE_BYTES
    yield
    session.ACKNOWLEDGE_BYTES, session.ALONE_BYTES = before


class Run:
    """The world of one seed, and its events."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"thresholds {seed}")
        session.ACKNOWLEDGE_BYTES = chance.choice(THRESHOLDS)
        session.ALONE_BYTES = session.ACKNOWLEDGE_BYTES * chance.choice((1, 4, 16))
        self.world = CounterWorld(seed, 2 + seed % 2, LIMITS)
        self.chance = self.world.chance

    def act(self, steps: int, trouble: Callable[[], None]) -> None:
        for _ in range(steps):
            kind = self.chance.random()
            if kind < 0.7:
                self.world.call_any()
            elif kind < 0.9:
                trouble()
            self.world.timeline.run_for(self.chance.choice((0, 0, 0.01, 0.2, 1.0)))
            self.world.check_bounds()

    def brief_trouble(self) -> None:
        """Causes a fault that every session must survive."""
        world, kind = self.world, self.chance.random()
        one, other = self.chance.sample(list(world.workers.values()), 2)
        if kind < 0.4:
            world.note("a connection breaks")
            world.streams.break_any()
        elif kind < 0.7:
            world.note(one.id, "does not reach", other.id)
            world.streams.cut(one.node.place, other.node.place)
            if self.chance.random() < 0.5:
                world.streams.cut(other.node.place, one.node.place)
            world.timeline.run_for(OUTAGE_S * self.chance.random())
            world.note("the network heals")
            world.streams.heal()
            world.timeline.run_for(PAUSE_S)
        else:
            world.note(one.id, "is frozen")
            one.node.freeze(self.chance.choice((0.1, 3.0, LONGEST_FREEZE_S)))

    def end(self) -> None:
        """Heals the network, and lets all calls end."""
        world = self.world
        world.streams.calm()
        world.timeline.run_until(lambda: not world.open_calls(), END_S, "calls stay open")
        world.timeline.run_for(LONGEST_FREEZE_S)
        world.check_bounds()
        world.check_rest()


def outlive_breaks(run: Run) -> None:
    """No worker dies, so none is lost and every counter is exact."""
    run.act(30, run.brief_trouble)
    run.end()
    world = run.world
    assert not world.lost_at_s, f"lost, though alive: {world.lost_at_s}"
    for caller in world.workers:
        for callee in world.workers.keys() - {caller}:
            world.check_exact(caller, callee)


def die_and_come_back(run: Run) -> None:
    """Workers die and others begin at their places: frames for the dead reach no other worker."""
    world = run.world

    def trouble() -> None:
        if run.chance.random() < 0.8 or len(world.workers) < 2:
            run.brief_trouble()
            return
        victim = run.chance.choice(list(world.workers.values()))
        world.kill(victim.id, is_silent=run.chance.random() < 0.5)
        world.timeline.run_for(run.chance.choice((0.0, 0.5, 20.0)))
        world.join(victim.node.place)

    run.act(30, trouble)
    run.end()
    for caller in world.workers:
        for callee in world.workers.keys() - {caller}:
            assert (caller, callee) not in world.lost_at_s, f"{callee} lives, but is lost"
            world.check_exact(caller, callee)
        dead = world.workers[caller].node.halves.keys() - world.workers.keys()
        assert dead == world.workers[caller].node.lost, "some who died are not lost"
    for pair, count in world.asked.items():
        assert world.answered[pair] <= world.counted[pair] <= count, f"{pair} count twice"


@pytest.mark.parametrize("program", [outlive_breaks, die_and_come_back])
@pytest.mark.parametrize("batch", batches(300), ids=name_of)
def test_frames_arrive_once_and_in_order(batch: range, program: Callable[[Run], None]) -> None:
    try_seeds(batch, Run, program, lambda run: run.world.trace)


def test_an_idle_session_says_nothing() -> None:
    world = CounterWorld(1, 2, LIMITS, Weather())
    world.workers[1].call(0, 100)
    world.timeline.run_for(10.0)
    halves = [worker.node.halves[1 - worker.id] for worker in world.workers.values()]
    sent = [half.outgoing.position for half in halves]
    assert all(half.acknowledgements for half in halves)
    world.timeline.run_for(1000.0)
    assert [half.outgoing.position for half in halves] == sent


def test_a_seed_tells_the_whole_run() -> None:
    runs = [Run(7), Run(7)]
    for run in runs:
        die_and_come_back(run)
    assert runs[0].world.trace == runs[1].world.trace
    assert len(runs[0].world.trace) > 20
