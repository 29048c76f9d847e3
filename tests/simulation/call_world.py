"""Workers that call each other in virtual time, the connections between them, and an observer.

Connections fulfil the assumption of calls (C1 of ``docs/protocols/calls.md``): a message arrives
once and in order, or both workers lose each other. The first message to a worker has to wait for
the connection. Workers die, connections break, and workers leave, gracefully or not.

The observer has a record of each call. It fills the record from messages, runs and outcomes that it
sees itself, not from the state of the machines.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.simulation.call_worker import Asked, Cancel, Record, Request, Served, Worker
from tests.simulation.timeline import Clock, Timeline
from torchweft.errors import CallCancelled, CallTimeout, NotInitialized, QueueFull, WorkerLost

SLACK_S = 1.5
"""How late a worker may react: it takes several steps, and each may have to wait for a moment."""
ROUNDING_S = 1e-6


class CallWorld:
    """Workers, connections and the observer.

    Attributes:
        workers: All workers by id, also those that are gone.
        gone: Ids of the workers that have died or left.
        polite: Ids of the workers that left when no other worker needed them any more.
        counts: How often each kind of event happened; a test checks that every kind happens.
    """

    def __init__(self, seed: int, size: int, *, strange: int | None = None) -> None:
        self.chance = random.Random(seed)
        self.timeline = Timeline()
        self.trace: list[tuple[Any, ...]] = []
        self.records: list[Record] = []
        self.creations: list[Served] = []
        self.counts: Counter[str] = Counter()
        self.gone: set[int] = set()
        self.polite: set[int] = set()
        self.queue_limit = self.chance.choice((1, 3, 100))
        self.slots = self.chance.choice((1, 2, 8))
        self.longest_pause_s = self.chance.choice((0.0, 1e-3, 0.02, 0.2))
        self.longest_delay_s = self.chance.choice((1e-3, 0.1, 1.0))
        self._arrivals_s: dict[tuple[int, int], float] = {}
        self._broken: set[frozenset[int]] = set()
        self._connecting: set[frozenset[int]] = set()
        self.workers: dict[int, Worker] = {}
        for worker_id in range(size):
            offset_s = self.chance.choice((0.0, -1e5, 1e5))
            clock = Clock(self.timeline, offset_s)
            self.workers[worker_id] = Worker(self, worker_id, clock, size)
        if strange is not None:
            self.workers[strange].is_strange = True

    def note(self, *what: Any) -> None:
        self.trace.append((round(self.timeline.now_s, 4), *what))
        self.counts[str(what[0])] += 1

    # Connections

    def connect(self, one: int, other: int) -> None:
        """Begins to connect two workers, unless that has begun."""
        pair = frozenset((one, other))
        if pair not in self._connecting:
            self._connecting.add(pair)
            delay_s = self.chance.choice((0.01, 0.5, 10.0)) * self.chance.random()
            self.timeline.later(delay_s, self._connected, pair)

    def _connected(self, pair: frozenset[int]) -> None:
        if pair in self._broken or pair & self.gone:
            return
        for one in pair:
            (other,) = pair - {one}
            self.workers[one].connected(other)

    def send(self, source: int, target: int, message: Any) -> None:
        """Sends a message, which arrives after all earlier ones."""
        span_s = self.longest_delay_s if source != target else self.longest_pause_s
        now_s = self.timeline.now_s
        at_s = now_s + span_s * self.chance.random() ** 4
        at_s = max(at_s, self._arrivals_s.get((source, target), 0.0))
        self._arrivals_s[source, target] = at_s
        self.timeline.later(at_s - now_s, self._arrive, source, target, message)

    def _arrive(self, source: int, target: int, message: Any) -> None:
        is_broken = source != target and frozenset((source, target)) in self._broken
        if target in self.gone or is_broken:
            return  # The connection or its reader has ended.
        self.workers[target].take(source, message)

    def sever(self, one: int, other: int) -> None:
        """Ends the connection of two workers; each notices after a while."""
        pair = frozenset((one, other))
        if pair in self._broken:
            return
        self._broken.add(pair)
        for worker, peer in ((one, other), (other, one)):
            self.timeline.later(self.chance.random(), self._lose, worker, peer)

    def _lose(self, worker: int, peer: int) -> None:
        if worker not in self.gone:
            self.workers[worker].lose(peer)

    def end(self, worker: int, how: str) -> None:
        """Ends a worker: it ``dies``, or ``leaves``."""
        if worker in self.gone:
            return
        self.note(how, worker)
        self.workers[worker].stop()
        self.gone.add(worker)
        for other in self.workers:
            if other != worker:
                self.sever(worker, other)

    # Events for the observer

    def sent(self, source: int, target: int, message: Any) -> None:
        """Checks a message that a worker sends to another worker, or to itself."""
        if isinstance(message, Request) and message.record is not None:
            record = message.record
            assert not record.was_taken_back, f"{record} is sent, and was taken back"
            record.was_sent, record.was_closed_before = True, record.is_closed
            peer = self.workers[source].peers[target]
            record.was_owed = not peer.is_retired and peer.lost is None
        elif isinstance(message, Cancel):
            for record in self.workers[source].records_of(target, message.numbers):
                assert record.is_closed, f"{record} is cancelled, and open"
                assert record.was_sent or record in self.workers[source].writing, (
                    f"{record} was not sent, and its callee is told that it is given up"
                )

    def is_due(self, record: Record) -> None:
        """Notes that there is a connection now, by which a kept call is sent."""
        assert not record.is_closed, f"{record} has ended, and is sent"
        record.was_due = True

    def answers(self, record: Record, outcome: Any) -> None:
        """Notes that a callee has an answer to send."""
        assert not record.was_told, f"{record} is answered twice"
        assert not record.is_cancel_received, f"{record} was cancelled, and is answered"
        record.was_told, record.told = True, outcome

    def cancel_received(self, callee: int, caller: int, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            served = self.workers[callee].arrived.get((caller, number))
            if served is not None and served.record is not None:
                record = served.record
                record.is_cancel_received = True
                record.cancelled_s = min(record.cancelled_s, self.workers[callee].now_s)

    def begins(self, served: Served, now_s: float) -> None:
        """Checks a function that begins to run."""
        self.note("begins", served.record)
        record = served.record
        if record is None:
            return
        record.runs += 1
        assert record.runs == 1, f"{record} runs twice"
        assert not record.was_refused, f"{record} was refused, and runs"
        assert not record.is_cancel_received, f"{record} was cancelled before, and runs"
        assert served.peer.lost is None, f"{record} runs for a lost worker"
        assert record.arrived_s is not None
        assert now_s <= record.arrived_s + record.limit_s + ROUNDING_S, f"{record} begins late"

    def goes_on(self, served: Served, now_s: float) -> None:
        """Checks a function that begins its work when a value is ready."""
        self.note("goes on", served.record)
        record = served.record
        if record is not None:
            assert not record.is_cancel_received, f"{record} was cancelled, and goes on"
            assert served.peer.lost is None, f"{record} goes on for a lost worker"
            assert record.arrived_s is not None
            assert now_s <= record.arrived_s + record.limit_s + ROUNDING_S, f"{record} is late"

    def not_begun(self, served: Served, now_s: float) -> None:
        """Checks why a function does not run in its turn."""
        self.note("not begun", served.record)
        record = served.record
        if record is not None:
            assert record.arrived_s is not None
            is_late = now_s > record.arrived_s + record.limit_s - ROUNDING_S
            is_unwanted = record.is_cancel_received or served.peer.lost is not None
            assert is_late or is_unwanted, f"{record} is not run"

    def nested(self, record: Record, served: Served, now_s: float) -> None:
        """Checks a nested call."""
        parent = served.record
        assert parent is not None
        assert parent.arrived_s is not None
        assert not parent.is_cancel_received, f"{record} is made for {parent}, which is cancelled"
        left_s = record.left_s = parent.arrived_s + parent.limit_s - now_s
        assert 0.0 <= record.limit_s <= left_s + ROUNDING_S, f"{record} outlasts {parent}"

    def refused_to_nest(self, served: Served, error: Exception, now_s: float) -> None:
        """Checks why a nested call is not made."""
        self.note("no nested call", served.record, type(error).__name__)
        parent = served.record
        assert parent is not None
        assert parent.arrived_s is not None
        if isinstance(error, CallTimeout):
            assert now_s > parent.arrived_s + parent.limit_s - ROUNDING_S, "there was time left"
        else:
            self._check_gone(parent, served)

    def _check_gone(self, parent: Record, served: Served) -> None:
        is_gone = parent.is_cancel_received or served.was_told or served.peer.lost is not None
        assert is_gone, f"{parent} was not given up"

    def cancels(self, served: Served) -> None:
        """Checks why a call is cancelled at its callee."""
        is_lost = served.peer.lost is not None
        if served.record is None:
            assert is_lost, "nobody has given a value up"
            assert not served.is_referred, "somebody refers to a value that is given up"
        else:
            assert is_lost or served.record.is_cancel_received, f"nobody gives {served.record} up"

    def finished(self, served: Served) -> None:
        """Checks that a waiting caller was told: its function has an outcome, or is not to run."""
        record = served.record
        if record is not None and not record.was_told:
            is_lost = served.peer.lost is not None
            assert is_lost or record.is_cancel_received or served.was_told, f"{record}: no answer"

    def closes(self, call: Asked) -> None:
        """Notes that a call is taken from its table, and has its outcome."""
        self.note("ends", call.record, call.error or call.frame)
        assert not call.record.is_closed, f"{call.record} ends twice"
        call.record.is_closed = True

    def ends(self, call: Asked, outcome: Any, now_s: float) -> None:
        """Checks the outcome of a call that the program is told."""
        record = call.record
        record.ends += 1
        record.outcome = outcome
        assert record.ends == 1, f"{record} ends twice"
        self.counts[type(outcome).__name__] += 1
        assert now_s <= record.deadline_s + SLACK_S, f"{record} ends long after its time"
        caller = self.workers[record.caller]
        lost_s = max(caller.peers[record.callee].lost_s, call.started_s)
        assert now_s <= lost_s + SLACK_S, f"{record} ends long after its callee was lost"
        if record.parent is not None:
            cancelled_s = max(record.parent.cancelled_s, call.started_s)
            assert now_s <= cancelled_s + SLACK_S, f"{record} ends long after its parent"
        if isinstance(outcome, CallTimeout):
            self._check_timeout(record, str(outcome), now_s)
        elif isinstance(outcome, CallCancelled):
            assert record.is_cancelled_by_user or (record.parent and call.parent is not None), (
                f"nobody has given {record} up"
            )
            if not record.is_cancelled_by_user:
                assert record.parent is not None
                self._check_gone(record.parent, call.parent)
        elif isinstance(outcome, WorkerLost):
            assert caller.peers[record.callee].lost is not None, f"{record.callee} is not lost"
            is_owed = record.was_owed and record.callee in self.polite
            assert not is_owed, f"{record.callee} has left {record} open"
        elif isinstance(outcome, NotInitialized):
            assert caller.is_closed, f"{record.caller} has not left"
        else:
            assert record.was_told, f"{record} was not answered"
            assert outcome is record.told, f"{record} gets the answer of another call"
            if isinstance(outcome, QueueFull):
                assert record.was_refused, f"{record} was not refused"
                assert not record.runs, f"{record} ran, and was refused"

    def _check_timeout(self, record: Record, text: str, now_s: float) -> None:
        assert now_s >= record.deadline_s - ROUNDING_S, f"{record} ends before its time"
        if abs(record.asked_s - record.left_s) < ROUNDING_S:
            return  # Both limits expire together.
        if record.left_s < record.asked_s:
            assert "the limit was that of worker" in text, text
        elif not record.was_due:
            assert "it was not sent" in text, text

    # At the end

    def check_rest(self) -> None:
        """Checks, at the end, that nothing is left."""
        for record in self.records:
            if record.caller not in self.gone:
                assert record.ends == 1, f"{record} never ends"
                assert record.was_sent != record.was_taken_back, f"{record}: sent or taken back"
            pair = frozenset((record.caller, record.callee))
            if record.was_closed_before and pair not in self._broken and not pair & self.gone:
                assert record.is_cancel_received, f"{record} had ended, and its callee never knew"
        for worker in self.workers.values():
            if worker.id not in self.gone:
                worker.check_rest()
        for served in self.creations:
            if served.worker.id not in self.gone and not served.has_ended:
                is_wanted = served.peer.lost is None or served.is_referred
                assert is_wanted, f"a value is being made at {served.worker.id} for nobody"
