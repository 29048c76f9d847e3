"""Calls in virtual time: nested, late, cancelled, refused, and lost with their workers.

Each seed is a few workers with threads that overtake each other, on connections that break. The
machines are those of ``engine.protocol.calls``. An observer checks that each call ends exactly
once, with its answer or a truthful error; that no function runs twice or for a cancelled call; that
no answer is lost; and that nothing is left in the end. ``WEFT_TEST_SEED=<seed>`` runs one seed
alone and prints its trace; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.call_world import CallWorld
from tests.simulation.seeds import batches, name_of, try_seeds

SEEDS = 100
BUSY_S = 8.0
REST_S = 200.0


class Run:
    """Programs at several workers, drawn from a seed."""

    def __init__(self, seed: int, *, has_strange: bool = False) -> None:
        self.world = CallWorld(seed, 2 + seed % 3, strange=0 if has_strange else None)
        self.chance = self.world.chance

    def at_any_time(self, function: Callable[..., None], *arguments: object) -> None:
        """Calls a function at a random time while the programs run."""
        self.world.timeline.later(BUSY_S * self.chance.random(), function, *arguments)

    def call(self) -> None:
        """Makes the workers call each other, often many at once."""
        for _ in range(self.chance.choice((3, 10, 25))):
            worker = self.chance.choice(list(self.world.workers.values()))
            self.at_any_time(worker.call_any)
            if self.chance.random() < 0.2:
                self.at_any_time(worker.create_any)
        if self.chance.random() < 0.3:
            worker = self.chance.choice(list(self.world.workers.values()))
            for _ in range(12):
                self.world.timeline.later(BUSY_S / 2, worker.call_any)

    def finish(self) -> None:
        """Runs the world to its end, and checks it."""
        self.world.timeline.run_for(REST_S)
        self.world.check_rest()


def live(run: Run) -> None:
    """Calls, with no worker lost."""
    run.call()
    run.finish()


def lose(run: Run) -> None:
    """Calls, while workers die, connections break and workers close."""
    run.call()
    world, chance = run.world, run.chance
    for _ in range(chance.choice((1, 1, 2))):
        one, other = chance.sample(list(world.workers), 2)
        kind = chance.choice(("dies", "breaks", "closes"))
        if kind == "dies":
            run.at_any_time(world.end, one, "dies")
        elif kind == "breaks":
            run.at_any_time(world.sever, one, other)
        else:
            run.at_any_time(world.workers[one].close)
    run.finish()


def leave(run: Run) -> None:
    """Calls, while workers that owe answers leave."""
    run.call()
    workers = list(run.world.workers.values())
    for worker in run.chance.sample(workers, run.chance.randint(1, len(workers))):
        run.at_any_time(worker.leave)
    run.finish()


def repeat(run: Run) -> None:
    """Calls, while one worker sends each call twice and is turned away."""
    run.call()
    run.finish()


PROGRAMS: dict[Callable[[Run], None], bool] = {live: False, lose: False, leave: False, repeat: True}
"""Programs, and whether one of their workers is strange."""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("batch", batches(SEEDS), ids=name_of)
def test_each_call_ends_once_and_truthfully(batch: range, program: Callable[[Run], None]) -> None:
    try_seeds(
        batch,
        lambda seed: Run(seed, has_strange=PROGRAMS[program]),
        program,
        lambda run: run.world.trace,
    )


def test_a_seed_tells_the_whole_run() -> None:
    first, second = Run(7), Run(7)
    for run in (first, second):
        lose(run)
    assert str(first.world.trace) == str(second.world.trace)
    assert len(first.world.trace) > 30
