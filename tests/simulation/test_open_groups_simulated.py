"""Open groups: workers join, leave gracefully, die and come back as another life, concurrently.

Each seed is a group on a network that breaks connections and delays everything. A worker leaves as
``OpenLeaving`` decides: it says so, waits until every member has noted it, serves calls in flight,
drops its references, and leaves when its last messages have arrived. So a call that a caller made
before it knew of the departure is answered. ``WEFT_TEST_SEED=<seed>`` runs one seed alone and
prints its trace; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.group_world import GroupWorld
from tests.simulation.leaving_member import LeavingMember
from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.engine.protocol.leaving import Left, OpenLeaving

END_S = 3000.0
PLACES = 5


class Worker(LeavingMember):
    """A worker of an open group."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.machine = OpenLeaving()

    def on_lost(self, peer: int, cause: str) -> None:
        left = peer in self.group.run.left
        before = len(self.failed)
        super().on_lost(peer, cause)
        if left and len(self.failed) > before:
            self.group.run.impolite.append((self.id, peer, self.failed[before:]))

    def on_tick(self) -> None:
        super().on_tick()
        if self.is_gone and self.are_last_words_heard():
            self.group.run.leave(self)


class Run:
    """A group, and its events."""

    def __init__(self, seed: int) -> None:
        self.world = GroupWorld(seed, Worker, self)
        self.chance = self.world.chance
        self.left: set[int] = set()
        self.killed: set[int] = set()
        self.impolite: list[tuple[Any, ...]] = []
        for _ in range(self.chance.randint(1, 3)):
            self.join()

    def join(self) -> None:
        """Begins a life at a free place, if there is one."""
        taken = {member.node.place for member in self.world.members.values()}
        if len(taken) < PLACES:
            place = self.chance.choice([place for place in range(PLACES) if place not in taken])
            newcomer = self.world.join(place)
            for member in self.world.members.values():
                if member is not newcomer:
                    member.act(member.machine.member_present(newcomer.id))

    def on_left(self, worker: Worker, _: Left) -> None:
        worker.is_gone = True

    def leave(self, worker: Worker) -> None:
        """Ends the life of a worker that may leave."""
        leaks = self.world.references.machines[worker.id].leaks()
        held = [leak for leak in leaks if leak.reference.owner != worker.id]
        assert not held, f"G4: {worker.id} leaves, but holds {held}"
        self.left.add(worker.id)
        self.world.note(worker.id, "leaves")
        self.world.kill(worker.id)

    def act(self, steps: int, may_die: bool) -> None:
        for _ in range(steps):
            kind = self.chance.random()
            if kind < 0.2:
                self.join()
            elif kind < 0.6:
                self._trouble(may_die)
            self.world.timeline.run_for(self.chance.choice((0.01, 0.3, 2.0)))

    def _trouble(self, may_die: bool) -> None:
        world, kind = self.world, self.chance.random()
        if not world.members:
            return
        member = self.chance.choice(list(world.members.values()))
        if kind < 0.6:
            world.note("a connection breaks")
            world.streams.break_any()
        elif kind < 0.8:
            world.note(member.id, "is frozen")
            member.node.freeze(self.chance.choice((0.2, 5.0, 30.0)))
        elif may_die:
            self.killed.add(member.id)
            world.kill(member.id, is_silent=self.chance.random() < 0.5)

    def rest(self) -> None:
        """Waits until nothing is in flight, and checks that owners know the exact state."""
        world = self.world
        world.streams.calm()
        world.timeline.run_until(world.is_calm, END_S, "the group never comes to rest")
        world.references.check_calm()

    def end(self) -> None:
        """Waits until all workers have left."""
        self.world.streams.calm()
        self.world.timeline.run_until(lambda: not self.world.members, END_S, "some can never leave")
        assert not self.impolite, f"calls to who left gracefully are lost: {self.impolite}"
        pairs = self.world.references._lost_pairs
        strays = [pair for pair in pairs if not pair & (self.left | self.killed)]
        assert not strays, f"lost, though alive: {strays}"
        twice = [call for call, count in self.world.ran.items() if count > 1]
        assert not twice, f"calls ran twice: {twice}"


def come_and_go(run: Run) -> None:
    """All workers join and leave in order."""
    run.act(20, may_die=False)
    run.rest()
    run.act(10, may_die=False)
    run.end()


def come_and_die(run: Run) -> None:
    """Some workers die, and others begin at their places."""
    run.act(20, may_die=True)
    run.rest()
    run.act(10, may_die=True)
    run.end()


@pytest.mark.parametrize("program", [come_and_go, come_and_die])
@pytest.mark.parametrize("batch", batches(200), ids=name_of)
def test_who_leaves_owes_nobody_an_answer(batch: range, program: Callable[[Run], None]) -> None:
    try_seeds(batch, Run, program, lambda run: run.world.trace)
