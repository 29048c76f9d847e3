"""The backward protocol: progress sent with gradients, discovery, and the end of a pass."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest

from torchweft.engine.protocol.backward import (
    CONNECTION,
    ROOTS,
    Abort,
    Action,
    Apply,
    Close,
    Complete,
    Discover,
    Driver,
    Fail,
    Failed,
    Gradients,
    Message,
    Participant,
    Progress,
    Send,
    Settled,
    Tell,
    failure_error,
)
from torchweft.errors import AutogradError
from torchweft.ids import scoped_id, worker_of

A1, A2 = scoped_id(1, 1), scoped_id(1, 2)
B1, B2 = scoped_id(2, 1), scoped_id(2, 2)


def ran(message_id: int, *answered: int) -> Progress:
    """Returns the progress of a worker that ran the gradients of one message at once."""
    return Progress([message_id], [message_id], list(answered))


# ---------------------------------------------------------------------------------- the driver


def test_a_failure_aborts_and_names_worker_and_operation() -> None:
    driver = Driver(0)
    driver.progressed(Progress([ROOTS], reached=[A1]))
    cause = ValueError("bad")
    *aborts, fail = driver.failed(Failed(2, "Broken.backward", cause))
    assert aborts == [Send(0, Abort()), Send(1, Abort())]
    assert isinstance(fail, Fail)
    error = failure_error(fail, "trainer")
    assert isinstance(error, AutogradError)
    assert (error.worker, error.operation, error.__cause__) == ("trainer", "Broken.backward", cause)
    assert driver.failed(Failed(2, "x", cause)) == []
    assert driver.progressed(ran(ROOTS)) == []


# ------------------------------------------------------------------------- both, in any order

WORKERS = range(4)


class Graphs:
    """Graphs without tensors: the messages that each message reaches, and its component.

    A message reaches messages that its sender received earlier. Messages that reach the same one
    share a component at their sender, and so do some other messages.
    """

    def __init__(self, chance: random.Random) -> None:
        count = chance.randrange(1, 14)
        numbers = [scoped_id(chance.choice(WORKERS), place + 1) for place in range(count)]
        self.receiver = {number: chance.choice(WORKERS) for number in numbers}
        self.reaches: dict[int, list[int]] = {ROOTS: []}
        for place, number in enumerate(numbers):
            received = [n for n in numbers[:place] if self.receiver[n] == worker_of(number)]
            self.reaches[number] = [n for n in received if chance.random() < 0.6]
        here = [n for n in numbers if self.receiver[n] == 0]
        self.reaches[ROOTS] = [n for n in here if chance.random() < 0.7]
        self.component = {number: number for number in self.reaches}
        for first in self.reaches:
            for second in self.reaches:
                if worker_of(first) == worker_of(second) and (
                    set(self.reaches[first]) & set(self.reaches[second]) or chance.random() < 0.1
                ):
                    self._join(first, second)
        self.live = {ROOTS}
        todo = [ROOTS]
        while todo:
            fresh = [n for n in self.reaches[todo.pop()] if n not in self.live]
            self.live.update(fresh)
            todo += fresh

    def _join(self, first: int, second: int) -> None:
        old, new = self.component[second], self.component[first]
        for number, component in self.component.items():
            if component == old:
                self.component[number] = new


class Model:
    """Models ``torchweft.autograd.local_pass.LocalPass`` on graphs without tensors."""

    def __init__(self, graphs: Graphs, worker: int) -> None:
        self.graphs = graphs
        self.mine = [n for n in graphs.reaches if worker_of(n) == worker]
        self.news: list[int] = []
        self.live: set[int] = set()
        self.arrived: set[int] = set()
        self.executed: set[int] = set()
        self.reached: set[int] = set()
        self.answered: set[int] = set()
        self.is_settled = False

    def announce(self, number: int) -> None:
        if number not in self.live:
            self.live.add(number)
            self.news.append(number)

    def arrive(self, number: int) -> None:
        assert number in self.mine
        assert number not in self.arrived
        self.announce(number)
        self.arrived.add(number)

    def work(self) -> tuple[list[tuple[int, int, list[str]]], Progress]:
        progress = Progress(walked=self.news)
        self.news = []
        fresh = {n for walked in progress.walked for n in self.graphs.reaches[walked]}
        fresh -= self.reached
        self.reached |= fresh
        for sends in self._components():
            self._advance(sends, progress)
        progress.reached = sorted(fresh - set(progress.answered))
        return [(worker_of(n), n, ["g"]) for n in progress.answered], progress

    def _components(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for number in self.mine:
            found.setdefault(self.graphs.component[number], []).append(number)
        return list(found.values())

    def _advance(self, sends: list[int], progress: Progress) -> None:
        live = [n for n in sends if n in self.live]
        if not live or not (self.is_settled or len(live) == len(sends)):
            return
        assert set(live) == self.graphs.live & set(sends), "it runs without some that are live"
        for number in sorted({n for send in live for n in self.graphs.reaches[send]}):
            waits_for = [send for send in live if number in self.graphs.reaches[send]]
            if number not in self.answered and self.arrived.issuperset(waits_for):
                self.answered.add(number)
                progress.answered.append(number)
        if self.arrived.issuperset(live) and not self.executed.issuperset(live):
            self.executed.update(live)
            progress.executed += live


class Network:
    """A pass over random graphs, on a network that delays, reorders and repeats messages."""

    def __init__(self, seed: int, repeats: float = 0.2) -> None:
        self.chance = random.Random(seed)
        self.repeats = repeats
        self.graphs = Graphs(self.chance)
        self.models = [Model(self.graphs, worker) for worker in WORKERS]
        self.parts = [Participant(worker, 0) for worker in WORKERS]
        self.driver = Driver(0)
        self.messages: list[tuple[int, int, Message]] = []
        self.counts: Counter[type] = Counter()
        self.ends: list[Action] = []
        self.closed: set[int] = set()

    def run(self) -> None:
        self.models[0].arrive(ROOTS)
        self.work(0)
        while self.messages:
            place = self.chance.randrange(len(self.messages))
            source, to, message = self.messages[place]
            if self.chance.random() >= self.repeats:
                self.messages.pop(place)
            if isinstance(message, Failed):
                self.carry_out(0, self.driver.failed(message))
            else:
                self.carry_out(to, self.parts[to].receive(source, copy.deepcopy(message)))
            if self.chance.random() < 0.7 or not self.messages:
                for worker in WORKERS:
                    self.work(worker)

    def work(self, worker: int) -> None:
        if not self.parts[worker].is_over and not self.ends:
            self.carry_out(worker, self.parts[worker].worked(*self.models[worker].work()))

    def carry_out(self, worker: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.counts[type(action.message)] += 1
                self.messages.append((worker, action.to_worker, action.message))
            elif isinstance(action, Tell):
                self.carry_out(worker, self.driver.progressed(action.progress))
            elif isinstance(action, Apply):
                self.apply(self.models[worker], action.message)
            elif isinstance(action, Close):
                self.closed.add(worker)
            else:
                if isinstance(action, Complete):
                    self.assert_all_has_run()
                self.ends.append(action)

    def apply(self, model: Model, message: Gradients | Discover | Settled) -> None:
        if isinstance(message, Gradients):
            model.arrive(message.message_id)
        elif isinstance(message, Discover):
            for number in message.message_ids:
                model.announce(number)
        else:
            model.is_settled = True

    def assert_all_has_run(self) -> None:
        executed = [number for model in self.models for number in model.executed]
        answered = [number for model in self.models for number in model.answered]
        assert sorted(executed) == sorted(self.graphs.live)
        assert sorted([*answered, ROOTS]) == sorted(self.graphs.live)


def test_every_pass_completes_once_when_all_that_is_live_has_run() -> None:
    asked = 0
    for seed in range(250):
        network = Network(seed)
        network.run()
        assert network.ends == [Complete()], seed
        asked += bool(network.counts[Discover])
    assert 20 < asked < 230, "both kinds of passes must be tried"


class Disturbed(Network):
    """A pass in which one worker fails, or is lost, at its ``patience``-th turn to work."""

    def __init__(self, seed: int, doomed: int, patience: int, *, is_lost: bool) -> None:
        super().__init__(seed, repeats=0.0)
        self.doomed = doomed
        self.patience = patience
        self.is_lost = is_lost

    def work(self, worker: int) -> None:
        self.patience -= worker == self.doomed
        if self.ends or worker != self.doomed or self.patience != 0:
            super().work(worker)
        elif self.is_lost:
            self.lose(worker)
        else:
            self.carry_out(worker, self.parts[worker].failed("an operation", "why"))

    def lose(self, lost: int) -> None:
        self.parts[lost].is_over = True
        self.closed.add(lost)
        self.messages = [entry for entry in self.messages if lost not in entry[:2]]
        for worker in WORKERS:
            if worker != lost:
                self.carry_out(worker, self.parts[worker].worker_lost(lost, "end of file"))
        self.carry_out(0, self.driver.worker_lost(lost, "end of file"))

    def carry_out(self, worker: int, actions: list[Action]) -> None:
        if not self.is_lost or self.patience > 0:
            super().carry_out(worker, actions)
            return
        vain = [a for a in actions if isinstance(a, Send) and a.to_worker == self.doomed]
        super().carry_out(worker, [action for action in actions if action not in vain])
        if any(not isinstance(send.message, (Failed, Abort)) for send in vain):
            self.carry_out(worker, self.parts[worker].failed(CONNECTION, "end of file"))


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failure_at_any_time_ends_a_pass_everywhere(is_lost: bool) -> None:
    failures = 0
    for seed in range(200):
        doomed = 1 + seed % 3
        network = Disturbed(seed, doomed, 1 + seed % 5, is_lost=is_lost)
        network.run()
        if network.ends == [Complete()]:
            continue
        failures += 1
        operation, error = (CONNECTION, "end of file") if is_lost else ("an operation", "why")
        (end,) = network.ends
        assert isinstance(end, Fail), seed
        assert (end.operation, end.error) == (operation, error), seed
        assert is_lost or end.worker == doomed, seed
        taken = {worker for worker in WORKERS if network.models[worker].live}
        assert taken <= network.closed, seed
    assert failures > 20
