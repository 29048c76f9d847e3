"""Closed groups from the first call to the end of shutdown, on a faulty network.

Each seed is a group whose workers call each other with references, over sessions whose connections
break. Workers die and are frozen, networks are cut for longer than any worker waits, and all clocks
differ. In all cases no call runs twice, the leader calls the group quiet only when it is, all
living workers are let go, and no reference is left. ``WEFT_TEST_SEED=<seed>`` runs one seed alone
and prints its trace; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.group_world import GroupWorld
from tests.simulation.leaving_member import LeavingMember
from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.engine.protocol.leaving import ClosedLeaving, Leader, Left

LEADER = 0
END_S = 2000.0
LONGEST_FREEZE_S = 60.0


class Worker(LeavingMember):
    """A worker of a closed group; the first one leads its shutdown."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        workers = set(range(self.group.run.size))
        self.machine = Leader(workers) if self.id == LEADER else ClosedLeaving()

    def on_left(self, action: Left) -> None:
        if action.lost == (LEADER,):  # No leader is left to say when.
            self.group.references.drop_all(self.id)


class Run:
    """A group, and its events."""

    def __init__(self, seed: int) -> None:
        self.world = GroupWorld(seed, Worker, self)
        self.chance = self.world.chance
        self.closed: list[Left] = []
        self.size = self.chance.randint(2, 4)
        for place in range(self.size):
            self.world.join(place)

    def on_left(self, worker: Worker, action: Left) -> None:
        if worker.id == LEADER:
            self.closed.append(action)
        else:
            worker.on_left(action)

    def act(self, steps: int, may_lose: bool) -> None:
        """Lets the programs run, with faults in between."""
        for _ in range(steps):
            if self.chance.random() < 0.5:
                self._trouble(may_lose)
            self.world.timeline.run_for(self.chance.choice((0.01, 0.3, 2.0)))

    def _trouble(self, may_lose: bool) -> None:
        world, kind = self.world, self.chance.random()
        ids = list(world.members)
        one, other = self.chance.choice(ids), self.chance.choice(ids)
        if kind < 0.5:
            world.note("a connection breaks")
            world.streams.break_any()
        elif kind < 0.65:
            world.note(one, "is frozen")
            world.members[one].node.freeze(self.chance.choice((0.2, 5.0, LONGEST_FREEZE_S)))
        elif kind < 0.85:
            self._cut(one, other, self.chance.choice((0.5, 2.0, 40.0)) if may_lose else 1.0)
        elif may_lose and len(ids) > 1 and (one != LEADER or self.chance.random() < 0.2):
            world.kill(one, is_silent=self.chance.random() < 0.5)

    def _cut(self, one: int, other: int, span_s: float) -> None:
        world = self.world
        world.note(one, "does not reach", other)
        world.streams.cut(one, other)
        if self.chance.random() < 0.7:
            world.streams.cut(other, one)
        world.timeline.run_for(span_s)
        world.note("the network heals")
        world.streams.heal()

    def end(self) -> None:
        """Heals the network, and waits until all workers are let go."""
        world = self.world
        world.streams.calm()
        world.timeline.run_until(self._are_all_let_go, END_S, "the group never ends")
        world.timeline.run_until(world.is_calm, END_S, "the references never come to rest")
        for worker in world.members.values():
            leaks = world.references.machines[worker.id].leaks()
            assert not leaks, f"G4: worker {worker.id} still has {leaks}"
            assert len(worker.endings) == 1, f"worker {worker.id} is let go: {worker.endings}"

    def _are_all_let_go(self) -> bool:
        return all(worker.endings for worker in self.world.members.values())

    def on_settle(self) -> None:
        """Checks, when the leader calls the group quiet, that workers wait only for lost ones."""
        world = self.world
        for worker in world.members.values():
            for entry in worker.calls.entries.values():
                chain = entry.request.chain | {LEADER}
                is_meant = world.is_undisturbed(chain) and world.is_awaited(entry.request)
                assert not is_meant, f"quiet, but {entry.request} is under way"
            if world.is_undisturbed(frozenset({worker.id, LEADER})):
                assert not worker.plans, f"quiet, but worker {worker.id} has not called shutdown"


def part_in_peace(run: Run) -> None:
    """Connections break, but no worker is cut off for long: none is lost, no call fails by it."""
    run.act(15, may_lose=False)
    run.end()
    world = run.world
    assert not world.references._lost_pairs, f"lost: {world.references._lost_pairs}"
    assert [closed.lost for closed in run.closed] == [()]
    assert world.asked == world.answered + len(world.given_up), "a call never ended"
    assert world.answered <= sum(world.ran.values()) <= world.asked
    world.references.check_empty()


def part_in_ruins(run: Run) -> None:
    """Workers die and are cut off."""
    run.act(15, may_lose=True)
    run.end()
    if LEADER in run.world.members:
        assert len(run.closed) == 1


@pytest.mark.parametrize("program", [part_in_peace, part_in_ruins])
@pytest.mark.parametrize("batch", batches(200), ids=name_of)
def test_a_group_ends_when_it_is_quiet(batch: range, program: Callable[[Run], None]) -> None:
    try_seeds(batch, Run, program, lambda run: run.world.trace)
