"""The backward protocol: who is asked, who runs, how a pass ends."""

from __future__ import annotations

import random

import pytest

from weft.errors import AutogradError
from weft.protocol.backward import (
    Abort,
    Action,
    Close,
    Complete,
    Discover,
    Done,
    Driver,
    Execute,
    Fail,
    Failed,
    Gradients,
    Message,
    Participant,
    PassKey,
    Phase,
    Reached,
    Run,
    Send,
    Start,
    Started,
    Walk,
    failure_error,
)

KEY = PassKey(7, 1)
RUN = Run(KEY, fast=False, retain_graph=False)


def sent(actions: list[Action], kind: type) -> dict[int, Message]:
    """Returns the messages of one kind by the worker they go to."""
    return {a.to_worker: a.message for a in actions if isinstance(a, Send)
            and isinstance(a.message, kind)}  # fmt: skip


# ---------------------------------------------------------------------------------- the driver


def test_a_pass_without_messages_runs_on_the_driver_only() -> None:
    driver = Driver(KEY, 0)
    assert driver.start({}) == [Send(0, RUN)]
    assert driver.receive(0, Done(KEY)) == [Complete()]
    assert driver.is_over


def test_discovery_goes_on_until_nothing_new_is_reached() -> None:
    driver = Driver(KEY, 0, retain_graph=True)
    assert driver.start({1: [11, 12]}) == [Send(1, Discover(KEY, 1, (11, 12)))]
    assert driver.receive(1, Reached(KEY, 1, {2: (21,), 0: (1,)})) == [
        Send(0, Discover(KEY, 2, (1,))),
        Send(2, Discover(KEY, 3, (21,))),
    ]
    assert sorted(driver.participants) == [0, 1, 2]
    assert driver.receive(0, Reached(KEY, 2, {})) == []
    told = sent(driver.receive(2, Reached(KEY, 3, {})), Run)
    assert told == dict.fromkeys([0, 1, 2], Run(KEY, fast=False, retain_graph=True))


def test_each_send_is_asked_for_once_and_run_follows_the_last_answer() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11]})
    assert list(sent(driver.receive(1, Reached(KEY, 1, {2: (21,)})), Discover)) == [2]
    told = sent(driver.receive(2, Reached(KEY, 2, {1: (11,), 2: (21,)})), Run)
    assert sorted(told) == [0, 1, 2]


def test_questions_to_a_busy_worker_are_put_together() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11], 2: [21]})
    assert driver.receive(1, Reached(KEY, 1, {2: (22, 23)})) == []
    assert driver.receive(2, Reached(KEY, 2, {2: (24,)})) == [
        Send(2, Discover(KEY, 3, (22, 23, 24)))
    ]


def test_repeated_answers_have_no_effect() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11]})
    answer = Reached(KEY, 1, {2: (21,)})
    driver.receive(1, answer)
    assert driver.receive(1, answer) == []
    driver.receive(2, Reached(KEY, 2, {}))
    assert driver.receive(2, Reached(KEY, 2, {})) == []
    for worker in (0, 0, 1):
        assert driver.receive(worker, Done(KEY)) == []
    assert driver.receive(2, Done(KEY)) == [Complete()]
    assert driver.receive(2, Done(KEY)) == []


def test_done_does_not_complete_a_pass_that_still_discovers() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11]})
    assert driver.receive(0, Done(KEY)) == []
    assert driver.receive(1, Done(KEY)) == []
    assert not driver.is_over


def test_fast_pass_tells_each_known_worker_once() -> None:
    driver = Driver(KEY, 0)
    assert list(sent(driver.start_fast([1, 0]), Run)) == [0, 1]
    assert driver.receive(0, Started(KEY, (1,))) == []
    assert driver.receive(0, Done(KEY)) == []
    # The end of a worker may be told before its start.
    assert driver.receive(1, Done(KEY)) == []
    assert list(sent(driver.receive(1, Started(KEY, (0, 2))), Run)) == [2]
    assert driver.receive(1, Started(KEY, (0, 2, 3))) == []
    assert driver.receive(2, Started(KEY, (1,))) == []
    assert driver.receive(2, Done(KEY)) == [Complete()]


def test_a_failure_aborts_everywhere_and_names_worker_and_operation() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11], 2: [21]})
    cause = ValueError("bad")
    *aborts, fail = driver.receive(1, Failed(KEY, 1, "Broken.backward", cause))
    assert aborts == [Send(worker, Abort(KEY)) for worker in (0, 1, 2)]
    assert isinstance(fail, Fail)
    error = failure_error(fail, "trainer")
    assert isinstance(error, AutogradError)
    assert (error.worker, error.operation, error.__cause__) == ("trainer", "Broken.backward", cause)
    assert driver.receive(2, Failed(KEY, 2, "x", cause)) == []


def test_a_lost_participant_ends_the_pass_and_is_told_nothing() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11]})
    assert driver.worker_lost(5, "end of file") == []
    actions = driver.worker_lost(1, "end of file")
    assert list(sent(actions, Abort)) == [0]
    assert actions[-1] == Fail(1, "its connection", "end of file")
    assert driver.worker_lost(1, "end of file") == []


def test_a_cancelled_pass_is_aborted() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11]})
    actions = driver.cancel("interrupted")
    assert list(sent(actions, Abort)) == [0, 1]
    assert driver.cancel("interrupted") == []


def test_a_stranger_is_not_listened_to() -> None:
    driver = Driver(KEY, 0)
    driver.start({1: [11]})
    assert driver.receive(9, Failed(KEY, 9, "x", "y")) == []
    assert not driver.is_over


# -------------------------------------------------------------------------------- a participant


def running(*, fast: bool = False) -> Participant:
    participant = Participant(KEY, 1, 0)
    participant.receive(0, Run(KEY, fast, retain_graph=False))
    return participant


def test_a_walk_is_made_once_and_its_answer_repeated() -> None:
    participant = Participant(KEY, 1, 0)
    question = Discover(KEY, 4, (11,))
    assert participant.receive(0, question) == [Walk(4, (11,))]
    assert participant.receive(0, question) == []
    answer = [Send(0, Reached(KEY, 4, {2: (21,)}))]
    assert participant.walked(4, {2: [21]}) == answer
    assert participant.walked(4, {2: [21]}) == []
    assert participant.receive(0, question) == answer
    assert participant.receive(0, RUN) == [Start(fast=False, retain_graph=False)]
    assert participant.receive(0, question) == answer


def test_gradients_that_overtake_run_are_kept() -> None:
    participant = Participant(KEY, 1, 0)
    assert participant.receive(2, Gradients(KEY, 11, "a")) == []
    assert participant.receive(3, Gradients(KEY, 12, "b")) == []
    assert participant.receive(0, RUN) == [
        Start(fast=False, retain_graph=False),
        Execute([(11, "a"), (12, "b")]),
    ]
    assert participant.receive(0, RUN) == []


def test_gradients_of_a_message_are_taken_once() -> None:
    participant = running()
    assert participant.receive(2, Gradients(KEY, 11, "a")) == [Execute([(11, "a")])]
    assert participant.receive(2, Gradients(KEY, 11, "a")) == []


def test_done_is_told_once_after_the_last_gradients() -> None:
    participant = running()
    assert participant.executed([(2, 21, "g")], is_done=False) == [Send(2, Gradients(KEY, 21, "g"))]
    assert participant.executed([(2, 22, "g")], is_done=True) == [
        Send(2, Gradients(KEY, 22, "g")),
        Send(0, Done(KEY)),
        Close(),
    ]
    # Another thread, which ran the last nodes, may report after the one that saw the end.
    assert participant.executed([(2, 23, "g")], is_done=True) == [Send(2, Gradients(KEY, 23, "g"))]
    assert participant.receive(2, Gradients(KEY, 11, "a")) == []


def test_a_fast_run_is_answered_with_the_workers_known() -> None:
    participant = Participant(KEY, 1, 0, known_workers=[0, 2])
    assert participant.receive(0, Run(KEY, fast=True, retain_graph=True)) == [
        Send(0, Started(KEY, (0, 2))),
        Start(fast=True, retain_graph=True),
    ]


def test_a_failure_is_told_once_and_ends_the_pass_here() -> None:
    participant = running()
    failed = Failed(KEY, 1, "Broken.backward", "why")
    assert participant.failed("Broken.backward", "why") == [Send(0, failed), Close()]
    assert participant.failed("Broken.backward", "why") == []
    assert participant.executed([(2, 21, "g")], is_done=True) == []
    assert participant.phase is Phase.ABORTED


def test_last_gradients_that_cannot_be_sent_fail_the_pass() -> None:
    participant = running()
    participant.executed([(2, 21, "g")], is_done=True)
    assert participant.phase is Phase.DONE
    told = [Send(0, Failed(KEY, 1, "sending", "why"))]
    assert participant.failed("sending", "why") == told


@pytest.mark.parametrize("events", range(3))
def test_abort_ends_a_pass_at_any_time(events: int) -> None:
    participant = Participant(KEY, 1, 0)
    for message in (Discover(KEY, 1, (11,)), RUN)[:events]:
        participant.receive(0, message)
    assert participant.receive(0, Abort(KEY)) == [Close()]
    for message in (Discover(KEY, 1, (11,)), RUN, Gradients(KEY, 11, "a"), Abort(KEY)):
        assert participant.receive(0, message) == []
    assert participant.walked(1, {}) == []


def test_the_loss_of_the_driver_ends_the_pass_here() -> None:
    participant = running()
    assert participant.worker_lost(2) == []
    assert participant.worker_lost(0) == [Close()]
    assert participant.worker_lost(0) == []


def test_only_the_driver_leads() -> None:
    participant = Participant(KEY, 1, 0)
    for message in (Discover(KEY, 1, (11,)), RUN, Abort(KEY)):
        assert participant.receive(2, message) == []
    assert participant.phase is Phase.DISCOVERING


# ------------------------------------------------------------------------- both, in any order


def simulate(seed: int, *, fast: bool) -> tuple[int, list[Action]]:
    """Runs a pass over a random forward program with an unreliable network.

    Message ``m`` was sent by ``senders[m]`` and reaches, at its sender, some earlier messages.

    Returns:
        How many gradients were answered, and how the pass ended.
    """
    chance = random.Random(seed)
    workers, messages = range(4), range(1, 12)
    sender = {m: chance.choice(workers) for m in messages}
    receiver = {m: chance.choice(workers) for m in messages}
    reaches = {
        m: [n for n in range(1, m) if receiver[n] == sender[m] and chance.random() < 0.6]
        for m in messages
    }
    reaches[0] = [n for n in messages if receiver[n] == 0 and chance.random() < 0.6]
    known = {
        w: {x for m in messages for x in (sender[m], receiver[m]) if w in (sender[m], receiver[m])}
        for w in workers
    }
    model = _Model(chance, sender, receiver, reaches)
    driver = Driver(KEY, 0)
    parts = [Participant(KEY, w, 0, known[w]) for w in workers]
    network: list[tuple[int, int, Message]] = []
    ends: list[Action] = []

    def carry_out(worker: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                network.append((worker, action.to_worker, action.message))
            elif isinstance(action, Walk):
                frontier = model.walk(worker, action.message_ids)
                carry_out(worker, parts[worker].walked(action.round, frontier))
            elif isinstance(action, Start):
                carry_out(worker, parts[worker].executed(*model.run(worker, action.fast)))
            elif isinstance(action, Execute):
                for message_id, _ in action.arrived:
                    carry_out(worker, parts[worker].executed(*model.arrive(worker, message_id)))
            elif not isinstance(action, Close):
                ends.append(action)

    frontier = model.walk(0, (0,))
    carry_out(0, driver.start_fast(known[0]) if fast else driver.start(frontier))
    while network:
        place = chance.randrange(len(network))
        source, to, message = network[place]
        if chance.random() < 0.8:
            network.pop(place)
        if isinstance(message, Reached | Started | Done | Failed):
            carry_out(0, driver.receive(source, message))
        else:
            carry_out(to, parts[to].receive(source, message))
    return model.expected_answers(fast) - model.answers, ends


class _Model:
    """Graphs without tensors: which message waits for which."""

    def __init__(
        self,
        chance: random.Random,
        sender: dict[int, int],
        receiver: dict[int, int],
        reaches: dict[int, list[int]],
    ) -> None:
        self.chance, self.sender, self.receiver, self.reaches = chance, sender, receiver, reaches
        self.live: dict[int, set[int]] = {worker: set() for worker in range(4)}
        self.arrived: dict[int, set[int]] = {worker: set() for worker in range(4)}
        self.answered: set[int] = set()
        self.answers = 0
        self.started: set[int] = set()

    def walk(self, worker: int, message_ids: tuple[int, ...]) -> dict[int, list[int]]:
        frontier: dict[int, list[int]] = {}
        for message_id in message_ids:
            self.live[worker].add(message_id)
            for reached in self.reaches[message_id]:
                frontier.setdefault(self.sender[reached], []).append(reached)
        return frontier

    def run(self, worker: int, fast: bool) -> tuple[list[tuple[int, int, object]], bool]:
        self.started.add(worker)
        if fast:
            self.live[worker] |= {m for m, sender in self.sender.items() if sender == worker}
        if 0 in self.live[worker]:
            self.arrived[worker].add(0)
        return self._ready(worker, fast)

    def arrive(self, worker: int, message_id: int) -> tuple[list[tuple[int, int, object]], bool]:
        assert worker in self.started
        assert message_id in self.live[worker] - self.arrived[worker]
        self.arrived[worker].add(message_id)
        return self._ready(worker, False)

    def _ready(self, worker: int, fast: bool) -> tuple[list[tuple[int, int, object]], bool]:
        outgoing: list[tuple[int, int, object]] = []
        for message_id, receiver in self.receiver.items():
            waits_for = {m for m in self.live[worker] if message_id in self.reaches[m]}
            is_due = bool(waits_for) or fast
            if receiver != worker or message_id in self.answered or not is_due:
                continue
            if waits_for <= self.arrived[worker]:
                self.answered.add(message_id)
                self.answers += 1
                outgoing.append((self.sender[message_id], message_id, None))
        return outgoing, self.live[worker] <= self.arrived[worker]

    def expected_answers(self, fast: bool) -> int:
        if fast:
            return len({m for m in self.sender if self._is_known(m)})
        live, todo = set(), list(self.reaches[0])
        while todo:
            message_id = todo.pop()
            if message_id not in live:
                live.add(message_id)
                todo += self.reaches[message_id]
        return len(live)

    def _is_known(self, message_id: int) -> bool:
        return {self.sender[message_id], self.receiver[message_id]} <= self.started


@pytest.mark.parametrize("fast", [False, True], ids=["smart", "fast"])
def test_every_pass_completes_once_with_every_answer_due(fast: bool) -> None:
    for seed in range(150):
        assert simulate(seed, fast=fast) == (0, [Complete()])
