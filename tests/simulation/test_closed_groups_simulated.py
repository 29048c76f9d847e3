"""Closed groups from the first call to the end of shutdown, while the network does its worst.

Each seed is a group whose workers call each other with references, over sessions whose connections
break; workers die and are frozen, networks are cut for longer than anybody waits, and all clocks
differ. Whatever happens: no call runs twice, the leader calls the group quiet only when it is, all
who live are let go, and no reference is left. ``WEFT_TEST_SEED=<seed>`` runs one seed alone and
prints what happened; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.group_member import Member
from tests.simulation.group_world import GroupWorld
from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.protocol.shutdown import Action, Closed, Leader, ProbeLater, Report, Send, Step

LEADER = 0
PROBE_PAUSE_S = 0.05
END_S = 2000.0
LONGEST_FREEZE_S = 60.0


class Worker(Member):
    """A worker of a closed group; the first one leads its shutdown."""

    leader: Leader | None = None
    is_settling = False
    is_settled = False
    closings = 0

    def on_finished(self) -> None:
        self.send(LEADER, ("step", Step.READY))

    def on_message(self, peer: int, message: tuple[Any, ...]) -> None:
        _, step, *arguments = message
        if step is Step.PROBE:
            report = int(self.is_idle), self.activity
            self.send(LEADER, ("step", Step.REPORT, *arguments, *report))
        elif step is Step.SETTLE:
            self.is_settling = True
            self.group.references.drop_all(self.id)
            self.on_tick()
        elif step is Step.CLOSE:
            self.closings += 1
        else:
            self._lead(peer, step, *arguments)

    def on_tick(self) -> None:
        machine = self.group.references.machines[self.id]
        if self.is_settling and not self.is_settled and machine.is_settled():
            self.is_settled = True
            self.send(LEADER, ("step", Step.SETTLED))

    def on_lost(self, peer: int, cause: str) -> None:
        super().on_lost(peer, cause)
        if self.leader is not None:
            self._act(self.leader.worker_lost(peer))
        elif peer == LEADER and not self.closings:
            self.closings += 1  # Nobody is left to say when.
            self.group.references.drop_all(self.id)

    def _lead(self, peer: int, step: Step, *arguments: int) -> None:
        leader = self.leader
        assert leader is not None, f"{step} comes to {self.id}, who does not lead"
        if step is Step.READY:
            self._act(leader.worker_ready(peer))
        elif step is Step.REPORT:
            probe_round, is_idle, activity = arguments
            report = Report(bool(is_idle), activity)
            self._act(leader.worker_reported(peer, probe_round, report))
        else:
            assert step is Step.SETTLED
            self._act(leader.worker_settled(peer))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if action.step is Step.SETTLE:
                    self.group.run.check_quiet()
                self.send(action.to, ("step", action.step, *action.arguments))
            elif isinstance(action, ProbeLater):
                self.node.clock.later(PROBE_PAUSE_S, self._probe)
            else:
                self.group.run.closed.append(action)

    def _probe(self) -> None:
        assert self.leader is not None
        self._act(self.leader.probe_again())


class Run:
    """A group, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.world = GroupWorld(seed, Worker, self)
        self.chance = self.world.chance
        self.closed: list[Closed] = []
        self.quiet_s: float | None = None
        for place in range(self.chance.randint(2, 4)):
            self.world.join(place)
        self.world.members[LEADER].leader = Leader(set(self.world.members))

    def act(self, steps: int, may_lose: bool) -> None:
        """Lets the programs run, with trouble in between."""
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
        """Lets the network heal and everybody go."""
        world = self.world
        world.streams.calm()
        world.timeline.run_until(self._are_all_let_go, END_S, "the group never ends")
        world.timeline.run_until(world.is_calm, END_S, "the references never come to rest")
        for worker in world.members.values():
            leaks = world.references.machines[worker.id].leaks()
            assert not leaks, f"G4: worker {worker.id} still has {leaks}"
            assert worker.closings == 1, f"worker {worker.id} is let go {worker.closings} times"

    def _are_all_let_go(self) -> bool:
        return all(worker.closings for worker in self.world.members.values())

    def check_quiet(self) -> None:
        """Checks, when the leader says so, that nobody waits but for who is lost."""
        world = self.world
        for worker in world.members.values():
            for entry in worker.calls._entries.values():
                chain = entry.request.chain | {LEADER}
                is_meant = world.is_undisturbed(chain) and world.is_awaited(entry.request)
                assert not is_meant, f"quiet, but {entry.request} is under way"
            if world.is_undisturbed(frozenset({worker.id, LEADER})):
                assert not worker.plans, f"quiet, but worker {worker.id} has not called shutdown"


def part_in_peace(run: Run) -> None:
    """Connections break, but nobody is cut off for long: nobody is lost, no call fails by it."""
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
    runs: list[Run] = []

    def start(seed: int) -> Callable[[], None]:
        runs[:] = [Run(seed)]
        return lambda: program(runs[0])

    try_seeds(batch, start, lambda: runs[0].world.trace)
