"""Workers join closed and open groups while others come late, die, or have the same name.

Each seed is one rendezvous. In a closed group, joining ends in time for every worker. All workers
that get a group get the same group, with all its ranks. While the leader lives, all workers that
get no group get the same reason. In an open group, a worker that has joined and all earlier members
know each other. No two living workers have the same name or rank; an id names one life.
``WEFT_TEST_SEED=<seed>`` runs one seed alone and prints its trace.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

import pytest

from tests.simulation.joining_world import Joiners, Life
from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.engine.protocol import joining
from torchweft.engine.protocol.joining import LEADER, Admission
from torchweft.engine.protocol.registration import Directory, Registration, Roster
from torchweft.errors import DuplicateName, RendezvousError, RendezvousTimeout

TIMEOUT_S = 20.0
SLACK_S = 5.0
"""Time for slow operations of the store."""
END_S = 100.0
SEEDS = 200


def life_of_nobody(worker: int) -> Life:
    raise KeyError(worker)


class ClosedRun:
    """A closed group whose rendezvous succeeds or fails."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.world = Joiners(chance)
        self.size = chance.randint(1, 5)
        self.is_calm = chance.random() < 0.4
        self.absent: set[int] = set()
        self.is_kept = chance.random() < 0.5
        if chance.random() < 0.3 and (self.is_kept or not self.is_calm):
            self._leave_keys_of_another_run()
        if not self.is_calm:
            self.absent = {rank for rank in range(self.size) if chance.random() < 0.15}
        for rank in range(self.size):
            if rank not in self.absent:
                self.world.timeline.later(self._start_s(), lambda rank=rank: self.begin(rank))

    def _start_s(self) -> float:
        return self.chance.random() * (1.0 if self.is_calm else self.chance.choice((1.0, 30.0)))

    def _leave_keys_of_another_run(self) -> None:
        """Leaves old keys, as in a file that was not emptied, or in the store of torchrun's agent.

        The former life may have ended at any step.
        """
        values = self.world.store.values
        old = tuple(Registration(f"old{rank}", rank, ("unix:@old",)) for rank in range(self.size))
        for registration in old:
            values[joining.arrival_key(registration.id)] = b""
            values[joining.worker_key(registration.id, "old")] = registration.encode()
        if self.chance.random() < 0.8:
            values[joining.ROUND] = b"old"
        if self.chance.random() < 0.5:
            late = Directory.refused(RendezvousTimeout("late", (self.size - 1,)))
            verdict = self.chance.choice((Directory("old", old), late))
            values[joining.directory_key("old")] = verdict.encode()

    def begin(self, rank: int) -> None:
        chance, size = self.chance, self.size
        name = "same" if not self.is_calm and chance.random() < 0.1 else f"worker{rank}"
        if not self.is_calm and chance.random() < 0.05:
            size += 1
        life = self.world.begin(Registration(name, rank, (f"unix:@{chance.random()}",)))
        steps = joining.join_closed(
            life.registration,
            size,
            f"token{rank}",
            TIMEOUT_S,
            self.world.clock,
            deque(),
            is_kept=self.is_kept,
        )

        def joined(directory: Directory) -> None:
            life.result, life.ended_s = directory, self.world.clock()

        def failed(error: Exception) -> None:
            life.error, life.ended_s = error, self.world.clock()
            self._end_store_with(rank)

        self.world.run(life, steps, joined, failed)
        if not self.is_calm and chance.random() < 0.1:
            self.world.timeline.later(10 * chance.random() ** 2, lambda: self._die(life, rank))

    def _die(self, life: Life, rank: int) -> None:
        if life.ended_s is None:
            self.world.kill(life)
            self._end_store_with(rank)

    def _end_store_with(self, rank: int) -> None:
        """Ends the store with the leader's process, which hosts it."""
        if rank == LEADER:
            self.world.store.is_gone = True

    def run(self) -> None:
        self.world.timeline.run_for(END_S)
        self.check()

    def check(self) -> None:
        lives = [life for life in self.world.lives if life.is_alive]
        for life in lives:
            limit_s = TIMEOUT_S + joining.GRACE_S + joining.READ_S + SLACK_S
            assert life.ended_s is not None, f"{life} waits for ever"
            assert life.ended_s - life.started_s < limit_s, f"{life} waits too long"
            if life.error is not None:
                is_known = isinstance(life.error, (RendezvousError, RuntimeError, KeyError))
                assert is_known, repr(life.error)
        found = [life.result for life in lives if life.result is not None]
        assert len(set(map(repr, found))) <= 1, f"several groups: {found}"
        for life in lives:
            if life.result is not None:
                self._check_group(life)
        if self.is_calm:
            assert len(found) == self.size, [life.error for life in lives]
        leader = next((life for life in lives if life.registration.id == LEADER), None)
        if leader is not None and isinstance(leader.error, RendezvousTimeout):
            self._check_reason(leader, lives)

    def _check_group(self, life: Life) -> None:
        workers = life.result.workers
        assert [worker.id for worker in workers] == list(range(self.size))
        assert len({worker.name for worker in workers}) == self.size, "two have one name"
        assert workers[life.registration.id] == life.registration, "a group of another run"

    def _check_reason(self, leader: Life, lives: list[Life]) -> None:
        """Checks that all workers present when the leader gave up know the missing ranks."""
        assert isinstance(leader.error, RendezvousTimeout)
        assert leader.ended_s is not None
        for life in lives:
            in_time = life.started_s + SLACK_S < leader.started_s + TIMEOUT_S
            patient = life.started_s + TIMEOUT_S + joining.GRACE_S > leader.ended_s
            if in_time and patient and isinstance(life.error, RendezvousTimeout):
                assert life.error.missing == leader.error.missing, (life.error, leader.error)


class OpenRun:
    """An open group in which workers join, leave, and die."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.world = Joiners(chance)
        self.may_die = chance.random() < 0.6
        self.span_s, self.ranks = chance.choice((0.3, 1.0, 3.0)), chance.choice((2, 4))
        for _ in range(chance.randint(2, 8)):
            self.world.timeline.later(self.span_s * chance.random(), self.begin)
        for _ in range(chance.choice((0, 3))):
            self.world.timeline.later(self.span_s * chance.random(), self.leave)

    def begin(self) -> None:
        rank = self.chance.randrange(self.ranks)
        name = f"worker{rank if self.chance.random() < 0.8 else self.chance.randrange(self.ranks)}"
        life = self.world.begin(Registration(name, rank, (f"unix:@{self.chance.random()}",)))
        steps = joining.join_open(life.registration, f"token{self.chance.random()}")

        def failed(error: Exception) -> None:
            life.error = error
            self.world.kill(life)

        self.world.run(life, steps, lambda admission: self._introduce(life, admission), failed)
        if self.may_die and self.chance.random() < 0.3:
            after_s = 2 * self.span_s * self.chance.random() ** 2
            self.world.timeline.later(after_s, lambda: self._die(life))

    def _die(self, life: Life) -> None:
        if life.is_alive:
            self.world.kill(life)
            for other in self.living():
                # Connected workers notice, and their rosters do not find it any more.
                if other.roster is not None:
                    other.roster.retire(life)

    def _introduce(self, life: Life, admission: Admission) -> None:
        life.registration, life.token = admission.me, admission.token
        life.roster = Roster(life, (), life_of_nobody, is_open=True)
        for answer in life.kept:
            self.world.later(answer)
        life.kept.clear()

        def joined(_: None) -> None:
            life.is_member, life.ended_s = True, self.world.clock()
            self.check_known(life)

        def failed(error: Exception) -> None:
            assert isinstance(error, DuplicateName), repr(error)
            self.world.leave(life.registration.id, life.token)
            life.error = error
            self._die(life)

        steps = joining.introduce(admission)
        self.world.run(life, steps, joined, failed)

    def leave(self) -> None:
        members = [life for life in self.living() if life.is_member]
        if members:
            life = self.chance.choice(members)
            self.world.leave(life.registration.id, life.token)
            self._die(life)

    def living(self) -> Iterator[Life]:
        return (life for life in self.world.lives if life.is_alive)

    def run(self) -> None:
        self.world.timeline.run_for(END_S)
        assert all(life.is_member for life in self.living()), "some never end joining"
        self.check_all()
        self.check_store()

    def check_known(self, newcomer: Life) -> None:
        """Checks that the newcomer and all members know each other."""
        for other in self.living():
            if other is not newcomer and other.is_member:
                assert newcomer.roster is not None
                assert other.roster is not None
                pair = f"{newcomer.registration} and {other.registration}"
                assert other.registration.id in newcomer.roster.by_id, f"not known: {pair}"
                assert newcomer.registration.id in other.roster.by_id, f"not known: {pair}"

    def check_store(self) -> None:
        """Checks that a last newcomer leaves keys of nobody in the store but of those that live."""
        self.chance = random.Random(0)
        self.may_die = False
        last = self.world.begin(Registration("last", 100, ("unix:@last",)))
        steps = joining.join_open(last.registration, "token of the last")
        failed: list[Exception] = []
        self.world.run(
            last, steps, lambda admission: self._introduce(last, admission), failed.append
        )
        self.world.timeline.run_for(END_S)
        assert last.is_member, failed
        there = {life.registration.id for life in self.living()}
        values = self.world.store.values
        assert set(joining._Table.decode(values[joining.PRESENT].decode()).present) == there
        registered = {int(key.split("/")[1]) for key in values if key.startswith("member/")}
        assert registered == there

    def check_all(self) -> None:
        members = list(self.living())
        for what in ("name", "rank", "id"):
            values = [getattr(life.registration, what) for life in members]
            assert len(set(values)) == len(values), f"two that live have one {what}: {values}"
        ids = [life.registration.id for life in self.world.lives if life.token]
        assert len(set(ids)) == len(ids), f"an id names two lives: {ids}"
        for life in members:
            for other in members:
                assert life.roster is not None
                registration = other.registration
                assert life.roster.by_name.get(registration.name) is other
                assert life.roster.by_rank.get(registration.rank) is other


Run = ClosedRun | OpenRun


@pytest.mark.parametrize("kind", [ClosedRun, OpenRun])
@pytest.mark.parametrize("batch", batches(SEEDS), ids=name_of)
def test_a_group_is_found_together(batch: range, kind: type[Run]) -> None:
    try_seeds(batch, kind, kind.run, lambda run: run.world.trace)
