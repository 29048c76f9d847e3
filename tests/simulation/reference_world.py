"""Workers with reference machines, a network between them, and an observer of all of it.

The observer counts handles and messages in flight itself, from the operations that it made the
workers do. At each release of a value it checks that no worker could still ask for it (G2). In calm
moments it checks that each owner's list of users is exact (G1, G3) and that nothing is left (G4).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.network import Packet, Sender
from torchweft.engine.protocol import references as wire
from torchweft.engine.protocol.references import (
    Action,
    Confirmed,
    OwnerLost,
    References,
    ReleaseValue,
    Send,
    ValueGone,
)
from torchweft.ids import ReferenceId

ARRIVAL_S = 1.0


@dataclass(frozen=True)
class Call:
    """A user's message that makes a value."""

    reference: ReferenceId


@dataclass(frozen=True, eq=False)
class Carrier:
    """A user's message that carries a reference."""

    reference: ReferenceId
    sender: int
    receiver: int
    token: int
    is_refused: bool


@dataclass(frozen=True)
class Homecoming:
    """A call to the owner of a value; the caller keeps its handle until the answer."""

    reference: ReferenceId
    number: int


@dataclass(frozen=True)
class Answer:
    """The answer to a call in which a reference came home."""

    number: int


@dataclass(frozen=True)
class Statements:
    """Messages of the protocol, which the session below delivers once."""

    number: int
    batch: bytes


@dataclass(frozen=True)
class Loss:
    """Membership's message to a worker that another worker is lost."""

    worker: int


def _unusual(is_sent: bool, is_sure: bool) -> tuple[str, ...]:
    if is_sent and is_sure:
        return ()
    return ("and takes it back",) if is_sent else ("without sending",)


class World:
    """The workers, and the observer's knowledge of them.

    Attributes:
        machines: The machine of each living worker.
        handles: The handles of each living worker.
        values: The existing values.
        ended: By worker, the references that its machine reported as unusable.
        trace: The events so far, unformatted: formatting would take longer than the run.
    """

    def __init__(self, size: int, network: Sender) -> None:
        self.network = network
        self.machines = {worker: References(worker, ARRIVAL_S) for worker in range(size)}
        self.handles: dict[int, Counter[ReferenceId]] = {w: Counter() for w in range(size)}
        self.values: set[ReferenceId] = set()
        self.ended: dict[int, set[ReferenceId]] = defaultdict(set)
        self.trace: list[tuple[Any, ...]] = []
        self._released: set[ReferenceId] = set()
        self._taken_back: set[ReferenceId] = set()
        self._under_way: set[Carrier] = set()
        self._lost_pairs: set[frozenset[int]] = set()
        self._losses: set[tuple[int, int]] = set()
        self._calls_home: dict[int, tuple[int, ReferenceId]] = {}
        self._home_numbers = itertools.count()
        self._batch_numbers = itertools.count()
        self._heard: set[int] = set()
        self._strays: set[ReferenceId] = set()
        self._closed: set[int] = set()
        self._touched: dict[ReferenceId, set[int]] = defaultdict(set)

    # Operations of users.

    def own(self, worker: int) -> None:
        reference = self.machines[worker].owned()
        self.values.add(reference)
        self._gain(worker, reference)
        self._done(worker, "makes", reference)

    def call(self, worker: int, owner: int, is_sent: bool = True, is_sure: bool = True) -> None:
        """Calls for a value; the call may stay unsent, or the caller unsure whether it was sent."""
        machine = self.machines[worker]
        reference = machine.creating(owner)
        self._gain(worker, reference)
        if is_sent or worker == owner:
            self.network.send(worker, owner, Call(reference), is_reliable=True)
        if not (is_sent and is_sure) and worker != owner:
            self._taken_back.add(reference)
            machine.not_created(reference)
        if worker == owner:
            self.values.add(reference)
        self._done(worker, "calls for", reference, *_unusual(is_sent, is_sure))

    def hand_on(
        self,
        worker: int,
        reference: ReferenceId,
        to: int,
        is_sent: bool = True,
        is_sure: bool = True,
        is_refused: bool = False,
    ) -> None:
        """Hands a reference on; the message may stay unsent or unread, or its sending uncertain."""
        machine = self.machines[worker]
        token = machine.hand_on(reference, to)
        carrier = Carrier(reference, worker, to, token, is_refused)
        self._touched[reference].add(to)
        if is_sent:
            self._under_way.add(carrier)
            self.network.send(worker, to, carrier, is_reliable=True)
        if not is_sent or (not is_sure and to != worker):
            self._under_way.discard(carrier)
            machine.undeliverable(reference, carrier.token, to)
        self._done(worker, "hands on", carrier, *_unusual(is_sent, is_sure))

    def copy(self, worker: int, reference: ReferenceId) -> None:
        self.machines[worker].handle_added(reference)
        self._gain(worker, reference)
        self._done(worker, "copies", reference)

    def drop(self, worker: int, reference: ReferenceId) -> None:
        self.handles[worker][reference] -= 1
        if not self.handles[worker][reference]:
            del self.handles[worker][reference]
            self.ended[worker].discard(reference)
        self.machines[worker].handle_dropped(reference)
        self._done(worker, "drops", reference)

    def bring_home(self, worker: int, reference: ReferenceId) -> int:
        """Calls the owner of a value with its reference; returns the number of the open call."""
        self.copy(worker, reference)
        number = next(self._home_numbers)
        self._calls_home[number] = (worker, reference)
        home = Homecoming(reference, number)
        self.network.send(worker, reference.owner, home, is_reliable=True)
        if (worker, reference.owner) in self._losses:
            self.end_call_home(number)
        return number

    def end_call_home(self, number: int) -> None:
        """Ends a call, answered or given up; the caller drops the handle that it kept."""
        worker, reference = self._calls_home.pop(number, (None, None))
        if worker is not None and reference is not None and self.handles[worker][reference]:
            self.drop(worker, reference)

    def calls_home(self) -> list[int]:
        """Returns the open calls."""
        return list(self._calls_home)

    def interrupt(self, worker: int, to: int) -> None:
        """Begins a call with a reference for a value; Ctrl-C: nothing is sent or taken back."""
        machine = self.machines[worker]
        if worker == to:
            return
        if held := list(self.handles[worker]):
            machine.hand_on(held[0], to)
        reference = machine.creating(to)
        self._gain(worker, reference)
        self._taken_back.add(reference)
        self._done(worker, "is interrupted in a call for", reference)

    def drop_all(self, worker: int) -> None:
        self._closed.add(worker)
        self.handles[worker].clear()
        self._forget_calls_home(lambda caller, _: caller == worker)
        # A worker's message to itself counts as a handle, so it is dropped as well.
        mine = {c for c in self._under_way if c.sender == c.receiver == worker}
        self._under_way -= mine
        self.machines[worker].drop_all()
        self._done(worker, "drops all")

    def holdings(self) -> list[tuple[int, ReferenceId]]:
        """Returns pairs of a worker and a reference that it may drop, in no particular order."""
        kept = Counter(self._calls_home.values())
        return [
            (worker, reference)
            for worker, counter in self.handles.items()
            for reference, count in counter.items()
            if count > kept[worker, reference]
        ]

    # Operations of the world.

    def join(self, worker: int) -> None:
        """Adds a worker, whose number was never used."""
        self.machines[worker] = References(worker, ARRIVAL_S)
        self.handles[worker] = Counter()

    def kill(self, worker: int, is_announced: bool = True) -> None:
        """Ends a worker; each other worker learns of it in its own time, or from the caller."""
        del self.machines[worker], self.handles[worker]
        self._forget_calls_home(lambda caller, _: caller == worker)
        for other in self.machines:
            self._lost_pairs.add(frozenset((worker, other)))
            if is_announced:
                self.network.send(other, other, Loss(worker), is_reliable=True)
        self.trace.append(("worker", worker, "dies"))

    def lose(self, worker: int, lost: int) -> None:
        """Makes a worker lose another one, which may be alive."""
        self._lost_pairs.add(frozenset((worker, lost)))
        self._losses.add((worker, lost))
        self.machines[worker].peer_lost(lost)
        self._done(worker, "loses", lost)
        for number, (caller, reference) in list(self._calls_home.items()):
            if caller == worker and reference.owner == lost:
                self.end_call_home(number)

    def tick(self, worker: int, now_s: float) -> None:
        self.machines[worker].tick(now_s)
        self._done(worker, "has its clock at", now_s)

    def arrive(self, packet: Packet) -> None:
        """Delivers a packet; a packet to a dead worker vanishes."""
        source, target, payload, _ = packet
        if isinstance(payload, Carrier):
            self._under_way.discard(payload)
        if target not in self.machines:
            return
        if isinstance(payload, Call):
            self._arrive_call(target, payload)
        elif isinstance(payload, Carrier):
            self._arrive_carrier(source, target, payload)
        elif isinstance(payload, Homecoming):
            self._arrive_homecoming(source, target, payload)
        elif isinstance(payload, Answer):
            self.end_call_home(payload.number)
        elif isinstance(payload, Loss):
            self.lose(target, payload.worker)
        elif payload.number not in self._heard:
            self._heard.add(payload.number)
            payload = wire.decode(payload.batch)
            for message in payload:
                self.machines[target].message(source, message)
        self._done(target, "has from", source, payload)

    def _arrive_call(self, worker: int, call: Call) -> None:
        reference = call.reference
        if worker == reference.creator:
            return
        if self.machines[worker].created(reference):
            assert reference not in self.values | self._released, f"{reference} is made twice"
            self.values.add(reference)

    def _arrive_carrier(self, sender: int, worker: int, carrier: Carrier) -> None:
        reference = carrier.reference
        if carrier.is_refused:
            self.machines[worker].refused(reference, carrier.token, sender)
        elif self.machines[worker].received(reference, carrier.token, sender):
            self._gain(worker, reference)
            if self._is_sheltered(reference) and reference not in self._strays:
                assert reference not in self._released, f"G2: {reference} arrives after its end"

    def refuse(self, worker: int, carrier: Carrier) -> None:
        """Notes the arrival of a message that is not read any more."""
        self._under_way.discard(carrier)
        self.machines[worker].refused(carrier.reference, carrier.token, carrier.sender)
        self._done(worker, "refuses", carrier)

    def _arrive_homecoming(self, caller: int, worker: int, home: Homecoming) -> None:
        reference = home.reference
        if home.number not in self._calls_home:
            if reference in self._released:
                self._strays.add(reference)  # An unusable handle, which may be handed on.
        elif self._is_sheltered(reference) and reference not in self._taken_back | self._strays:
            assert reference not in self._released, f"G2: {reference} comes home after its end"
        if self.machines[worker].came_home(reference):
            self._gain(worker, reference)
        self.network.send(worker, caller, Answer(home.number), is_reliable=True)

    def _gain(self, worker: int, reference: ReferenceId) -> None:
        if worker not in self._closed:
            self.handles[worker][reference] += 1
        self._touched[reference].add(worker)

    def _done(self, worker: int, *what: Any) -> None:
        self.trace.append(("worker", worker, *what))
        batches: dict[int, list[wire.Message]] = {}
        for action in self.machines[worker].take_actions():
            if isinstance(action, Send):
                batches.setdefault(action.to, []).append(action.message)
            else:
                self.trace.append(("worker", worker, "has to", action))
                self._observe(worker, action)
        for to, messages in batches.items():
            statements = Statements(next(self._batch_numbers), wire.encode(messages))
            self.network.send(worker, to, statements, is_reliable=True)

    # Checks of the observer.

    def _observe(self, worker: int, action: Action) -> None:
        reference = action.reference  # type: ignore[union-attr]
        if isinstance(action, ReleaseValue):
            assert worker == reference.owner, f"worker {worker} does not own {reference}"
            assert reference in self.values, f"{reference} is released, but was not there"
            self.values.remove(reference)
            self._released.add(reference)
            if self._is_sheltered(reference):
                self._check_nobody_needs(reference)
        elif isinstance(action, Confirmed):
            is_made = reference in self.values | self._released
            assert is_made or self._has_lost(worker, reference), f"{reference} is not made yet"
        elif isinstance(action, ValueGone):
            is_known = reference in self._taken_back | self._strays
            is_excused = is_known or not self._is_sheltered(reference)
            assert is_excused, f"G2: {reference} is gone for worker {worker}"
            self.ended[worker].add(reference)
        elif isinstance(action, OwnerLost):
            assert self._has_lost(worker, reference), f"the owner of {reference} lives"
            self.ended[worker].add(reference)

    def _is_sheltered(self, reference: ReferenceId) -> bool:
        """Returns whether no two workers that ever touched ``reference`` have lost each other."""
        touched = self._touched[reference] | {reference.owner}
        return not any(pair <= touched for pair in self._lost_pairs)

    def _has_lost(self, worker: int, reference: ReferenceId) -> bool:
        """Returns whether a worker and the owner of a value have lost each other."""
        return frozenset((worker, reference.owner)) in self._lost_pairs

    def _forget_calls_home(self, is_meant: Callable[[int, ReferenceId], bool]) -> None:
        for number, call in list(self._calls_home.items()):
            if is_meant(*call):
                del self._calls_home[number]

    def _check_nobody_needs(self, reference: ReferenceId) -> None:
        holders = [worker for worker, counter in self.handles.items() if counter[reference]]
        assert not holders, f"G2: {reference} is released, but workers {holders} hold it"
        carriers = [c for c in self._under_way if c.reference == reference]
        assert not carriers, f"G2: {reference} is released, but is on its way: {carriers}"

    def check_calm(self) -> None:
        """Checks, when nothing is in flight, that the owners know the exact state."""
        for worker, machine in self.machines.items():
            assert machine.is_settled(), f"worker {worker} waits for something that will not come"
        for reference in {reference for _, reference in self.holdings()} | self.values:
            if reference.owner in self.machines:
                self._check_users(reference)
        for worker, reference in self.holdings():
            is_there = reference in self.values and reference.owner in self.machines
            is_usable = is_there and not self._has_lost(worker, reference)
            assert is_usable != (reference in self.ended[worker]), (
                f"worker {worker} is wrong about {reference}"
            )

    def _check_users(self, reference: ReferenceId) -> None:
        expected = {
            worker
            for worker, counter in self.handles.items()
            if counter[reference]
            and worker != reference.owner
            and not self._has_lost(worker, reference)
        }
        if reference not in self.values:
            expected = set()
        leaks = {leak.reference: leak for leak in self.machines[reference.owner].leaks()}
        users = set(leaks[reference].users) if reference in leaks else set()
        assert users == expected, f"G1: users of {reference} are {expected}, not {users}"

    def check_empty(self) -> None:
        """Checks, when all handles are dropped, that nothing is left anywhere."""
        self.check_calm()
        left = {r for r in self.values if r.owner in self.machines}
        assert not left, f"G1: nobody needs {left}, but it is not released"
        for worker, machine in self.machines.items():
            assert machine.leaks() == [], f"G4: worker {worker} still has {machine.leaks()}"
            if not self._lost_pairs:
                self._check_forgotten(machine)

    def _check_forgotten(self, machine: References) -> None:
        """Checks private fields: numbers remembered one by one would accumulate without bound."""
        seen = [*machine._seen.values(), *machine._owned._created.values()]
        above = sum(len(numbers._above) for numbers in seen)
        assert above == 0, f"{above} numbers are remembered one by one"
