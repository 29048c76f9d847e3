"""Graceful shutdown while calls and their nested calls are still under way.

Each seed is one group on a random network, where packets overtake each other and come twice. An
observer knows every call. When the leader says that the group is quiet, only calls that a lost
worker has left behind may be open. Every living worker must be let go once, after all have settled.
``WEFT_TEST_SEED=<seed>`` runs one seed alone; ``WEFT_TEST_SEEDS`` sets how many are tried.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.simulation.network import Faults, Network, Packet
from tests.simulation.seeds import batches, name_of, try_seeds
from torchweft.engine.protocol.leaving import (
    Action,
    Leader,
    Left,
    ProbeLater,
    Report,
    Send,
    Step,
)

SEEDS = 300
DEEPEST = 2


@dataclass(frozen=True)
class Call:
    """A call from one worker to another; ``chain`` are the workers that it depends on."""

    number: int
    caller: int
    callee: int
    chain: frozenset[int]
    parent: Call | None
    depth: int


@dataclass
class Worker:
    """The counts of a worker's shell."""

    plans: int
    open_calls: dict[int, Call] = field(default_factory=dict)
    nested: dict[int, set[int]] = field(default_factory=dict)
    running: int = 0
    activity: int = 0
    seen: set[int] = field(default_factory=set)
    is_settled: bool = False
    closings: int = 0

    def report(self) -> Report:
        return Report(not self.running and not self.open_calls, self.activity)


class Group:
    """Workers that call each other, shut down, and may die."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        faults = Faults.draw(self.chance)
        self.network = Network(self.chance, faults)
        count = self.chance.randint(1, 5)
        self.workers = {rank: Worker(self.chance.choice((0, 1, 3))) for rank in range(count)}
        self.leader = Leader(set(self.workers))
        self.calls: dict[int, Call] = {}
        self.killed: set[int] = set()
        self.closed: list[Left] = []
        self.phases_of_loss: set[Step] = set()
        self.lost_before_close: set[int] = set()
        # The worst case is little activity that never ends and keeps moving between workers.
        self.unawaited, self.persistence = self.chance.randint(0, 40), self.chance.choice((0.5, 1))
        self.slowness = self.chance.choice((0, 0.8))
        self.nestings = self.chance.choice(((0,), (0, 0, 1, 2)))
        self.numbers = iter(range(1, 100_000))
        for rank in self.workers:
            self.later(rank, "plan")
        for _ in range(self.chance.choice((0, 0, 1, 2))):
            self.later(self.chance.randrange(count), "die", self.chance.choice((0, 5, 20, 40)))

    def run(self) -> None:
        for _ in range(20_000):
            packet = self.network.deliver()
            if packet is None:
                break
            if packet.target not in self.killed:
                self.arrive(packet)
        self.check_ended()

    def later(self, rank: int, *what: object) -> None:
        """Schedules an event at a worker."""
        self.network.send(rank, rank, what, is_reliable=True)

    def arrive(self, packet: Packet) -> None:
        kind, *arguments = packet.payload
        getattr(self, f"on_{kind}")(packet.target, packet.source, *arguments)

    # The programs

    def on_plan(self, rank: int, _: int) -> None:
        """Makes a call of the main program or, at its end, shuts down; never waits."""
        worker = self.workers[rank]
        if worker.plans:
            worker.plans -= 1
            self.call(rank, None)
            self.later(rank, "plan")
        else:
            self.network.send(rank, 0, ("step", Step.READY), is_reliable=True)

    def call(self, rank: int, parent: Call | None) -> int:
        callee = self.chance.choice(list(self.workers))
        chain = frozenset({rank, callee}) | (parent.chain if parent else frozenset())
        depth = parent.depth + 1 if parent else 0
        call = Call(next(self.numbers), rank, callee, chain, parent, depth)
        self.calls[call.number] = call
        worker = self.workers[rank]
        worker.open_calls[call.number] = call
        worker.activity += 1
        self.network.send(rank, callee, ("call", call), is_reliable=True)
        if callee in self.killed:
            self.later(rank, "lost", callee)
        return call.number

    def on_call(self, rank: int, _: int, call: Call) -> None:
        worker = self.workers[rank]
        if call.number not in worker.seen:
            worker.seen.add(call.number)
            worker.running += 1
            self.later(rank, "work", call)

    def on_work(self, rank: int, _: int, call: Call) -> None:
        """Runs a function, which answers now or when its nested calls have been answered."""
        worker = self.workers[rank]
        self.call_unawaited(rank)
        count = self.chance.choice(self.nestings) if call.depth < DEEPEST else 0
        worker.nested[call.number] = {self.call(rank, call) for _ in range(count)}
        worker.running -= 1
        worker.activity += 1
        self.answer_if_complete(rank, call)

    def call_unawaited(self, rank: int) -> None:
        """Makes a call, now and then, for which the calling function does not wait."""
        if self.unawaited and self.chance.random() < self.persistence:
            self.unawaited -= 1
            self.call(rank, None)

    def answer_if_complete(self, rank: int, call: Call) -> None:
        if not self.workers[rank].nested[call.number]:
            self.network.send(rank, call.caller, ("reply", call.number), is_reliable=True)

    def on_reply(self, rank: int, _: int, number: int) -> None:
        worker = self.workers[rank]
        call = worker.open_calls.pop(number, None)
        if call is not None:
            self.calls.pop(number, None)
            worker.running += 1
            self.later(rank, "answered", call)

    def on_answered(self, rank: int, _: int, call: Call) -> None:
        """Continues the waiting thread or a callback."""
        worker = self.workers[rank]
        if call.parent is not None:
            worker.nested[call.parent.number].discard(call.number)
            self.answer_if_complete(rank, call.parent)
        elif self.nestings != (0,):
            self.call_unawaited(rank)
        worker.running -= 1
        worker.activity += 1

    # Death

    def on_die(self, rank: int, _: int, moments: int) -> None:
        if moments:
            self.later(rank, "die", moments - 1)
            return
        if rank == 0:
            return  # The others close when the leader is lost; no worker is left to name the lost.
        self.killed.add(rank)
        self.network.kill(rank)
        for other in self.workers.keys() - self.killed:
            self.later(other, "lost", rank)

    def on_lost(self, rank: int, _: int, lost: int) -> None:
        worker = self.workers[rank]
        for call in [call for call in worker.open_calls.values() if call.callee == lost]:
            self.on_reply(rank, lost, call.number)
        if rank == 0:
            self.phases_of_loss.add(self.leader.phase)
            if self.leader.phase is not Step.CLOSE:
                self.lost_before_close.add(lost)
            self.act(self.leader.member_lost(lost))

    # Shutdown

    def on_step(self, rank: int, source: int, step: Step, *arguments: int) -> None:
        worker = self.workers[rank]
        if step is Step.PROBE and self.chance.random() < self.slowness:
            self.later(rank, "step", step, *arguments)  # Its reader is busy.
        elif step is Step.PROBE:
            report = worker.report()
            told = ("step", Step.REPORT, *arguments, report.is_idle, report.activity)
            self.network.send(rank, 0, told, is_reliable=True)
        elif step is Step.SETTLE:
            self.later(rank, "settled")
        elif step is Step.CLOSE:
            worker.closings += 1
            self.check_closing()
        else:
            self.act(self.leader.received(source, step, [*map(int, arguments)]))

    def on_settled(self, rank: int, _: int) -> None:
        self.workers[rank].is_settled = True
        self.network.send(rank, 0, ("step", Step.SETTLED), is_reliable=True)

    def on_probe(self, rank: int, _: int) -> None:
        self.act(self.leader.probe_again())

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if action.step is Step.SETTLE:
                    self.check_quiet()
                told = ("step", action.step, *action.arguments)
                self.network.send(0, action.to, told, is_reliable=True)
            elif isinstance(action, ProbeLater):
                self.later(0, "probe")
            else:
                self.closed.append(action)

    # Invariants

    def living(self) -> dict[int, Worker]:
        return {rank: worker for rank, worker in self.workers.items() if rank not in self.killed}

    def check_quiet(self) -> None:
        under_way = [call for call in self.calls.values() if not call.chain & self.killed]
        assert not under_way, f"the group is called quiet with {under_way} under way"
        unready = [rank for rank, worker in self.living().items() if worker.plans]
        assert not unready, f"workers {unready} have not even called shutdown"

    def check_closing(self) -> None:
        unsettled = [rank for rank, worker in self.living().items() if not worker.is_settled]
        assert not unsettled, f"some are let go before {unsettled} have settled"

    def check_ended(self) -> None:
        assert len(self.network) == 0, "the group never comes to rest"
        assert len(self.closed) == 1
        staying = [rank for rank, worker in self.living().items() if not worker.closings]
        assert not staying, f"workers {staying} were never let go"
        lost = set(self.closed[0].lost)
        assert lost <= self.killed, f"workers {lost - self.killed} live, but are called lost"
        assert lost >= self.lost_before_close, "somebody lost is not named"


@pytest.mark.parametrize("batch", batches(SEEDS), ids=name_of)
def test_all_stay_until_the_group_is_quiet_and_all_are_let_go(batch: range) -> None:
    try_seeds(batch, Group, Group.run)
