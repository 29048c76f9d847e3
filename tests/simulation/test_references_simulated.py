"""Reference counting over thousands of bad networks.

Each seed is one replayable program of random steps on a random network. A failure names its seed;
``WEFT_TEST_SEED=<seed> pytest tests/simulation/test_references_simulated.py`` runs that seed alone
and prints its trace. ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.simulation.network import Faults, Network
from tests.simulation.reference_world import ARRIVAL_S, World
from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.ids import ReferenceId

SEEDS = 300
MOST_ROUNDS = 500
"""Resend intervals after which a world that is still not calm counts as stuck."""


class Run:
    """One program on one network, both drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.network = Network(self.chance, Faults.draw(self.chance))
        self.world = World(self.chance.randint(2, 4), self.network)

    def act(self, steps: int) -> None:
        """Takes random steps, and lets random numbers of packets arrive in between."""
        for _ in range(steps):
            self._step()
            for _ in range(self.chance.choice((0, 1, 2, 5))):
                self._deliver()

    def calm(self) -> None:
        """Delivers everything and lets time pass until all workers are settled."""
        self.network.heal()
        for _ in range(MOST_ROUNDS):
            while self._deliver():
                pass
            if all(machine.is_settled() for machine in self.world.machines.values()):
                return
            self.network.now_s += ARRIVAL_S
            self._tick_all()
        raise AssertionError("the workers never come to rest")

    def drop_everything(self) -> None:
        """Drops all handles in random order, while the network continues."""
        while holdings := self.world.holdings():
            self.world.drop(*self.chance.choice(holdings))
            if self.chance.random() < 0.5:
                self._deliver()

    def _step(self) -> None:
        chance, world = self.chance, self.world
        workers = list(world.machines)
        worker, other = chance.choice(workers), chance.choice(workers)
        held = list(world.handles[worker])
        kind = chance.random()
        if kind < 0.15 or (not held and kind < 0.6):
            world.call(worker, other, is_sent=self._is_usual(), is_sure=self._is_usual())
        elif kind < 0.2:
            world.own(worker)
        elif kind < 0.5 and held:
            usual = self._is_usual(), self._is_usual(), not self._is_usual()
            world.hand_on(worker, chance.choice(held), other, *usual)
        elif kind < 0.52 and held:
            world.copy(worker, chance.choice(held))
        elif kind < 0.6 and held:
            self._call_home_or_give_up(worker, chance.choice(held))
        elif kind < 0.85 and held:
            self._drop_any()
        elif kind < 0.95:
            self.network.now_s += ARRIVAL_S / 2
            world.tick(worker, self.network.now_s)
        elif kind < 0.98:
            self.network.cut(worker, other)
        else:
            self.network.heal()

    def _call_home_or_give_up(self, worker: int, reference: ReferenceId) -> None:
        world = self.world
        if reference.owner != worker:
            world.bring_home(worker, reference)
        if self.chance.random() < 0.3 and (calls := world.calls_home()):
            world.end_call_home(self.chance.choice(calls))

    def _drop_any(self) -> None:
        if holdings := self.world.holdings():
            self.world.drop(*self.chance.choice(holdings))

    def _is_usual(self) -> bool:
        return self.chance.random() < 0.9

    def _deliver(self) -> bool:
        packet = self.network.deliver()
        if packet is None:
            return False
        self.world.arrive(packet)
        return True

    def _tick_all(self) -> None:
        for worker in self.world.machines:
            self.world.tick(worker, self.network.now_s)


def live_and_let_go(run: Run) -> None:
    """Works, pauses, works again and drops everything."""
    run.act(steps=20)
    run.calm()
    run.world.check_calm()
    run.act(steps=10)
    run.drop_everything()
    run.calm()
    # Messages that were still in flight have brought new handles.
    run.drop_everything()
    run.calm()
    run.world.check_empty()


def pass_around(run: Run) -> None:
    """Makes workers gain and drop one value repeatedly, so that late messages meet newer ones."""
    run.world.own(0)
    (x,) = run.world.handles[0]
    for _ in range(40):
        holdings = run.world.holdings()
        worker, _ = run.chance.choice(holdings)
        if worker and run.chance.random() < 0.6:
            run.world.drop(worker, x)
        else:
            run.world.hand_on(worker, x, run.chance.randrange(len(run.world.machines)))
        for _ in range(run.chance.choice((0, 1, 2, 6))):
            run._deliver()
        if run.chance.random() < 0.1:
            run.network.now_s += ARRIVAL_S
            run._tick_all()
    run.calm()
    run.world.check_calm()
    run.drop_everything()
    run.calm()
    run.world.check_empty()


def go_home(run: Run) -> None:
    """Calls owners with their own values; some calls are given up while they are under way."""
    for owner in run.world.machines:
        run.world.own(owner)
    for _ in range(60):
        worker, reference = run.chance.choice(run.world.holdings())
        other = run.chance.randrange(len(run.world.machines))
        kind = run.chance.random()
        if kind < 0.3:
            run.world.hand_on(worker, reference, other)
        elif kind < 0.5 and worker == reference.owner:
            run.world.call(worker, other)
        elif kind < 0.9 and worker != reference.owner:
            run._call_home_or_give_up(worker, reference)
        elif len(run.world.holdings()) > 1:
            run.world.drop(worker, reference)
        for _ in range(run.chance.choice((0, 1, 2, 6))):
            run._deliver()
    run.calm()
    assert not run.world.calls_home(), "a call is never answered"
    run.world.check_calm()
    run.drop_everything()
    run.calm()
    run.drop_everything()
    run.calm()
    run.world.check_empty()


def shut_down(run: Run) -> None:
    """Works, and then drops everything by force, with messages still in flight."""
    run.act(steps=20)
    for worker in run.world.machines:
        if not run._is_usual():
            run.world.interrupt(worker, run.chance.choice(list(run.world.machines)))
    for worker in run.world.machines:
        run.world.drop_all(worker)
    run.calm()
    run.world.check_empty()


def lose_workers(run: Run) -> None:
    """Works, while one worker or two die."""
    for _ in range(min(run.chance.randint(1, 2), len(run.world.machines) - 1)):
        run.act(steps=15)
        victim = run.chance.choice(list(run.world.machines))
        run.network.kill(victim)
        run.world.kill(victim)
    run.act(steps=8)
    run.calm()
    run.world.check_calm()
    run.drop_everything()
    run.calm()
    run.world.check_empty()


PROGRAMS = [live_and_let_go, pass_around, go_home, shut_down, lose_workers]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("batch", batches(SEEDS), ids=name_of)
def test_no_value_dies_early_or_stays(batch: range, program: Callable[[Run], None]) -> None:
    try_seeds(batch, Run, program, lambda run: run.world.trace)


def test_a_seed_tells_the_whole_run() -> None:
    first, second = Run(7), Run(7)
    for run in (first, second):
        live_and_let_go(run)
    assert str(first.world.trace) == str(second.world.trace)
    assert len(first.world.trace) > 50
