"""First connections: both sides dial at once, greetings get lost, peers are busy or dead.

Each seed is some workers that need each other at about the same time, and a network as in
``test_sessions_simulated``. Callers give up after a while and come back, or do not. Two living
workers must end up with the same session, whichever side dialled it, and lose no living worker.
Dead workers must be lost once, and at once if their system reports their end.
``WEFT_TEST_SEED=<seed>`` runs one seed alone; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.simulation.connections import Limits
from tests.simulation.counter_world import CounterWorld
from tests.simulation.seeds import batches, name_of, try_seeds
from tests.simulation.streams import Weather
from torchweft.engine.protocol.connecting import State

LIMITS = Limits(detection_s=20.0, reconnect_s=60.0, connect_s=20.0)
"""A worker redials from half of ``detection_s`` in silence on. The other half must outlast a cut,
and then two attempts, whatever the worker's clock says: else the network would lose the living.
"""
SEED_COUNT = 600
SLACK_S = 3.0
LONGEST_CUT_S = 4.0
PAUSE_S = 2.0
"""The pause between two cuts, in which all workers hear from each other."""
LEAST_PIECE_BYTES = 10
FAREWELL = "it had to go"


class Run:
    """The world of one seed, whose workers have just started."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.world = CounterWorld(seed, 2 + seed % 3, LIMITS, weather)
        self.chance = self.world.chance
        streams = self.world.streams
        if streams.weather.largest_piece_bytes < LEAST_PIECE_BYTES:
            # In the smallest pieces, 5 % of which break, 49 greetings of 50 break: then nobody gets
            # through within the time limit.
            breaks = min(streams.weather.breaks, 0.01)
            streams.weather = dataclasses.replace(streams.weather, breaks=breaks)
        for worker in self.world.workers.values():
            worker.node.is_eager = self.chance.random() < 0.7

    def disturb(self, steps: int) -> None:
        """Makes the network fail while connections are made; freezes workers and makes calls."""
        world, chance = self.world, self.chance
        for _ in range(steps):
            one, other = chance.sample(list(world.workers.values()), 2)
            kind = chance.random()
            if kind < 0.3:
                world.streams.break_any()
            elif kind < 0.4:
                world.streams.swallow_any()
            elif kind < 0.6:
                world.note(one.id, "does not reach", other.id)
                world.streams.cut(one.node.place, other.node.place)
                world.timeline.run_for(LONGEST_CUT_S * chance.random())
                world.streams.heal()
                world.timeline.run_for(PAUSE_S)
            elif kind < 0.7:
                one.node.freeze(chance.choice((0.1, 2.0, 40.0)))
            else:
                one.call(other.id, 50)
            world.timeline.run_for(chance.choice((0.0, 0.0, 0.01, 0.1, 0.5)))

    def end(self) -> None:
        """Heals the network, and makes all workers call all peers that they have not lost."""
        world = self.world
        world.streams.calm()
        for one in world.workers.values():
            for peer, half in list(one.node.halves.items()):
                if not half.is_lost:
                    one.call(peer, 50)
        world.timeline.run_until(lambda: not world.open_calls(), 600.0, "calls stay open")
        world.timeline.run_for(100.0)

    def check_pairs(self) -> None:
        """Checks that living pairs are connected, and agree on the connection."""
        for one in self.world.workers.values():
            for other in self.world.workers.values():
                if one.id < other.id:
                    halves = one.node.halves[other.id], other.node.halves[one.id]
                    terms = [half.machine.session for half in halves]
                    assert terms[0] is not None
                    assert terms[1] is not None
                    assert terms[0][::2] == terms[1][::2], f"{terms}: not the same connection"
                    assert terms[0].was_dialled != terms[1].was_dialled
                    states = [half.machine.state for half in halves]
                    assert states == [State.LINKED, State.LINKED], f"{one.id}, {other.id}: {states}"
                    self.world.check_exact(one.id, other.id)
                    self.world.check_exact(other.id, one.id)


def meet(run: Run) -> None:
    """No worker dies: all are connected in the end, and none is lost."""
    run.disturb(12)
    run.end()
    assert not run.world.lost_at_s, f"lost, though alive: {run.world.causes}"
    run.check_pairs()


def meet_the_dying(run: Run) -> None:
    """Workers die while connections are made, and others begin at their places."""
    world, chance = run.world, run.chance
    for _ in range(chance.randint(1, 2)):
        run.disturb(chance.randint(0, 5))
        victim = chance.choice(list(world.workers.values()))
        world.kill(victim.id, is_silent=chance.random() < 0.5)
        world.timeline.run_for(chance.choice((0.0, 0.0, 0.5, 3.0)))
        world.join(victim.node.place)
    run.disturb(5)
    run.end()
    for one, worker in world.workers.items():
        dead = worker.node.halves.keys() - world.workers.keys()
        assert worker.node.lost == dead, f"{one} has lost {worker.node.lost}, dead are {dead}"
    run.check_pairs()


def lose_the_gone_at_once(run: Run) -> None:
    """A worker dies, and its system reports it: others lose it at once, connected or not."""
    world = run.world
    world.streams.calm()
    world.timeline.run_for(run.chance.choice((0.0, 0.01, 0.05, 10.0)))
    victim = run.chance.choice(list(world.workers.values()))
    world.kill(victim.id, is_silent=False)
    for worker in world.workers.values():
        worker.call(victim.id, 50)
    world.timeline.run_for(SLACK_S)
    for one in world.workers:
        assert (one, victim.id) in world.lost_at_s, f"{one} still waits for {victim.id}"
    assert len(world.lost_at_s) == len(world.workers)


def wait_for_the_busy(run: Run) -> None:
    """A worker is stopped before any contact: the others wait, and connect when it continues."""
    world = run.world
    busy = run.chance.choice(list(world.workers.values()))
    busy.node.freeze(run.chance.choice((30.0, 300.0)))
    run.disturb(6)
    world.timeline.run_for(busy.node.clock.frozen_s)
    run.end()
    assert not world.lost_at_s, f"lost, though alive: {world.causes}"
    run.check_pairs()


def meet_over_a_wall(run: Run) -> None:
    """Only one side can dial the other: its connection is accepted, whatever its id."""
    world = run.world
    world.streams.calm()
    one, other = run.chance.sample(list(world.workers.values()), 2)
    world.note(one.id, "cannot dial", other.id)
    world.streams.wall(one.node.place, other.node.place)
    world.timeline.run_for(SLACK_S)
    run.end()
    assert not world.lost_at_s, f"lost, though alive: {world.causes}"
    run.check_pairs()


def say_goodbye(run: Run) -> None:
    """A worker leaves: the others know why, and do not dial it again."""
    world = run.world
    run.disturb(3)
    run.end()
    leaver = run.chance.choice(list(world.workers.values()))
    world.note(leaver.id, "says goodbye")
    leaver.node.say_goodbye(FAREWELL)
    if run.chance.random() < 0.5:
        world.streams.break_any()
    world.timeline.run_until(leaver.node.is_heard, 60.0, "the farewell is not heard")
    others = [worker for worker in world.workers.values() if worker is not leaver]
    dials = [worker.node.halves[leaver.id].dials for worker in others]
    world.kill(leaver.id, is_silent=False)
    world.timeline.run_for(SLACK_S)
    assert all(world.causes.get((worker.id, leaver.id)) == FAREWELL for worker in others)
    assert [worker.node.halves[leaver.id].dials for worker in others] == dials
    assert len(world.lost_at_s) == len(world.workers)


def lose_one_another(run: Run) -> None:
    """A worker declares another lost: the other loses it, too, and no connection is made."""
    world = run.world
    world.streams.calm()
    world.timeline.run_for(run.chance.choice((0.0, 0.01, 10.0)))
    one, other = run.chance.sample(list(world.workers.values()), 2)
    one.node.lose(other.id, "it sent nonsense")
    one.node.lose(other.id, "end of file")
    assert world.causes[one.id, other.id] == "it sent nonsense"
    other.call(one.id, 50)
    world.timeline.run_for(LIMITS.reconnect_s + SLACK_S)
    assert world.lost_at_s.keys() == {(one.id, other.id), (other.id, one.id)}
    run.end()
    assert one.node.halves[other.id].end is other.node.halves[one.id].end is None


PROGRAMS: list[Callable[[Run], None]] = [
    meet,
    meet_the_dying,
    lose_the_gone_at_once,
    wait_for_the_busy,
    meet_over_a_wall,
    say_goodbye,
    lose_one_another,
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("batch", batches(SEED_COUNT), ids=name_of)
def test_living_workers_meet_and_dead_ones_are_lost(
    batch: range, program: Callable[[Run], None]
) -> None:
    try_seeds(batch, Run, program, lambda run: run.world.trace)


def test_a_seed_tells_the_whole_run() -> None:
    runs = [Run(5), Run(5)]
    for run in runs:
        meet_the_dying(run)
    assert runs[0].world.trace == runs[1].world.trace
