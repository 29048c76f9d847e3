"""The failure detector: a worker loses exactly the peers whose systems do not answer in time.

Each seed is a group whose sessions are idle or in use. Clocks are days off and a tenth too fast or
too slow. Connections break and tell neither end, cuts stop one direction or both, and workers are
frozen for much longer than the detection time. ``WEFT_TEST_SEED=<seed>`` runs one seed alone;
``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.connections import Limits
from tests.simulation.counter_world import CounterWorld
from tests.simulation.seeds import batches, name_of, try_seeds
from tests.simulation.streams import Weather

TIMES_S = (8.0, 10.0, 30.0)
SLOWEST_CLOCK = 0.9
SLACK_S = 2.0
"""Time for pauses between two attempts, and for delays."""


class Run:
    """The world of one seed, with its own time limits."""

    def __init__(self, seed: int) -> None:
        self.world = CounterWorld(seed, 2 + seed % 2, Limits(), Weather())
        self.chance = chance = self.world.chance
        times_s = chance.choice(TIMES_S), chance.choice(TIMES_S)
        self.limits = Limits(*times_s, connect_s=times_s[1])
        self.shorter_s = min(self.limits.detection_s, self.limits.reconnect_s)
        self.kinds = ["break", "cut", "freeze", "call"]
        self.longest_outage_s = self.shorter_s / 3
        if chance.random() < 0.5:
            # Half of the time is over before a worker suspects that a connection is dead.
            self.kinds.append("swallow")
            self.longest_outage_s = self.shorter_s / 8
        weather = Weather(longest_delay_s=0.05, deafness=chance.choice((0.0, 0.5, 1.0)))
        self.world = CounterWorld(seed, 2 + seed % 2, self.limits, weather)
        self.world.timeline.run_for(1.0)

    def trouble(self) -> None:
        """Makes the network fail for much less than the allowed time, or freezes a worker."""
        world, chance = self.world, self.chance
        one, other = chance.sample(list(world.workers.values()), 2)
        for kind in chance.sample(self.kinds, 2):
            world.note(one.id, kind, other.id)
            if kind == "break":
                world.streams.break_any()
            elif kind == "swallow":
                world.streams.swallow_any()
            elif kind == "cut":
                world.streams.cut(one.node.place, other.node.place)
                if chance.random() < 0.5:
                    world.streams.cut(other.node.place, one.node.place)
            elif kind == "freeze":
                chance.choice((one, other)).node.freeze(chance.choice((1.0, 20.0, 300.0)))
            else:
                one.call(other.id, 50)
        world.timeline.run_for(self.longest_outage_s * chance.random())
        world.streams.heal()
        world.note("healed")
        world.timeline.run_for(self.shorter_s / 2)

    def let_all_wake(self) -> None:
        frozen_s = max(worker.node.clock.frozen_s for worker in self.world.workers.values())
        self.world.timeline.run_for(frozen_s + self.shorter_s)


def keep_who_answers(run: Run) -> None:
    """No worker is lost, and all sessions are connected in the end."""
    for _ in range(20):
        run.trouble()
    run.let_all_wake()
    assert not run.world.lost_at_s, f"lost, though alive: {run.world.lost_at_s}"
    for worker in run.world.workers.values():
        silent = [half.peer for half in worker.node.halves.values() if half.end is None]
        assert not silent, f"{worker.id} has no connection to {silent}"
        assert not len(worker.calls), f"calls of {worker.id} are not answered"


def lose_who_is_dead(run: Run) -> None:
    """A worker dies, alone or with its host: the others notice within the time limit."""
    for _ in range(run.chance.randint(0, 5)):
        run.trouble()
    run.let_all_wake()
    world = run.world
    victim = run.chance.choice(list(world.workers))
    with_host = run.chance.random() < 0.5
    died_s = world.timeline.now_s
    world.kill(victim, is_silent=with_host)
    if not with_host and run.chance.random() < 0.5:
        world.join(world.streams.chance.choice((victim, victim, 7)))  # At its place, or elsewhere.
    limit_s = 2 * SLACK_S
    if with_host:
        limit_s += max(run.limits.detection_s, run.limits.reconnect_s) / SLOWEST_CLOCK
    world.timeline.run_for(limit_s)
    for worker in world.workers:
        if victim in world.workers[worker].node.halves:
            at_s = world.lost_at_s.pop((worker, victim), None)
            assert at_s is not None, f"{worker} still waits for {victim}, who died at {died_s:.1f}"
    assert not world.lost_at_s, f"lost, though alive: {world.lost_at_s}"


def lose_who_is_cut_off(run: Run) -> None:
    """Two workers are cut off, in one direction or both: they lose each other, but no others."""
    for _ in range(run.chance.randint(0, 5)):
        run.trouble()
    run.let_all_wake()
    world = run.world
    one, other = run.chance.sample(list(world.workers), 2)
    world.note(one, "is cut off from", other)
    world.streams.cut(one, other)
    if run.chance.random() < 0.5:
        world.streams.cut(other, one)
    # With one direction left, one side hears the other until the other side gives up.
    times_s = run.limits.detection_s + run.limits.reconnect_s
    world.timeline.run_for(times_s / SLOWEST_CLOCK + run.limits.patience_s + SLACK_S)
    assert world.lost_at_s.keys() == {(one, other), (other, one)}
    world.streams.heal()
    world.timeline.run_for(10 * times_s)
    assert world.lost_at_s.keys() == {(one, other), (other, one)}


@pytest.mark.parametrize("program", [keep_who_answers, lose_who_is_dead, lose_who_is_cut_off])
@pytest.mark.parametrize("batch", batches(200), ids=name_of)
def test_only_who_does_not_answer_is_lost(batch: range, program: Callable[[Run], None]) -> None:
    try_seeds(batch, Run, program, lambda run: run.world.trace)
