"""A worker of a simulated group: its programs, and the shell around its machines.

Workers call each other with references of all kinds in arguments and results. Functions take some
time, make nested calls, and keep or drop their references. Callers give up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.connections import Node
from tests.simulation.network import Packet
from tests.simulation.reference_world import Carrier, Homecoming
from torchweft.engine.protocol.calls import CallClient
from torchweft.engine.wire.frames import Frame
from torchweft.ids import ReferenceId

if TYPE_CHECKING:
    from tests.simulation.group_world import GroupWorld

TICK_S = 0.5
DEEPEST = 2
LONGEST_WORK_S = 2.0
TIMEOUTS_S = (0.5, 5.0, 1e6)


@dataclass(frozen=True, eq=False)
class Request:
    """A call, with its user messages and the workers that its end depends on."""

    number: int
    caller: int
    callee: int
    chain: frozenset[int]
    parent: Request | None
    depth: int
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """The answer to a call."""

    number: int
    items: tuple[Any, ...]


@dataclass(eq=False)
class OpenCall:
    """The caller's record of a call."""

    worker: int
    deadline_s: float
    request: Request | None = None


class Member:
    """One life of a worker. Subclasses decide how a group ends."""

    def __init__(self, group: GroupWorld, node: Node) -> None:
        self.group = group
        self.node = node
        self.chance = group.chance
        self.calls: CallClient[OpenCall] = CallClient()
        self.plans = self.chance.choice((0, 3, 8))
        self.running = 0
        self.activity = 0
        self.failed: list[Request] = []
        self.is_gone = False
        """Whether it takes no more calls, and newcomers do not learn of it."""
        self._waited_for: dict[Request, set[int]] = {}
        node.on_frame = self._on_frame
        node.on_lost = self.on_lost

    def start(self) -> None:
        """Begins its program."""
        self.node.clock.later(self.chance.random(), self._plan)
        self._tick()

    @property
    def id(self) -> int:
        return self.node.id

    @property
    def is_idle(self) -> bool:
        return not self.running and not len(self.calls)

    # Methods that subclasses override.

    def on_finished(self) -> None:
        """Called at the end of the program."""

    def on_message(self, peer: int, message: tuple[Any, ...]) -> None:
        """Takes a message about leaving."""

    def on_tick(self) -> None:
        """Checks whether something is due."""

    def callable_peers(self) -> list[int]:
        """Returns the peers that may be called."""
        return [peer for peer, half in self.node.halves.items() if not half.is_lost]

    # The program

    def _plan(self) -> None:
        if not self.plans:
            self.on_finished()
            return
        self.plans -= 1
        kind = self.chance.random()
        if kind < 0.2:
            self.group.references.own(self.id)
        elif kind < 0.4:
            self._drop_one()
        else:
            self._call(None)
        self.node.clock.later(self.chance.random(), self._plan)

    def _drop_one(self) -> None:
        held = [ref for worker, ref in self.group.references.holdings() if worker == self.id]
        if held:
            self.group.references.drop(self.id, self.chance.choice(held))

    def _call(self, parent: Request | None) -> int | None:
        peers = self.callable_peers()
        if not peers:
            return None
        callee = self.chance.choice(peers)
        timeout_s = self.chance.choice(TIMEOUTS_S)
        entry = OpenCall(callee, self.node.clock.now_s + timeout_s)
        number = self.calls.add(entry)
        chain = frozenset({self.id, callee}) | (parent.chain if parent else frozenset())
        depth = parent.depth + 1 if parent else 0
        items = self.group.captured(lambda: self._pack_arguments(callee))
        entry.request = Request(number, self.id, callee, chain, parent, depth, items)
        self.activity += 1
        self.group.asked += 1
        self.send(callee, entry.request)
        return number

    def _pack_arguments(self, callee: int) -> None:
        references = self.group.references
        if self.chance.random() < 0.4:
            references.call(self.id, callee)
        for reference in self._some_held():
            if reference.owner == callee and self.chance.random() < 0.7:
                references.bring_home(self.id, reference)
            else:
                references.hand_on(self.id, reference, callee)

    def _some_held(self) -> list[ReferenceId]:
        held = list(self.group.references.handles[self.id])
        return self.chance.sample(held, min(len(held), self.chance.choice((0, 0, 1, 2))))

    # Calls

    def send(self, peer: int, message: Any) -> None:
        self.group.post(self.id, peer, message)

    def _on_frame(self, peer: int, frame: Frame) -> None:
        self.take(peer, self.group.taken(frame.id))

    def take(self, peer: int, message: Any) -> None:
        """Takes a message, in the order of its session."""
        if isinstance(message, Request):
            self._on_request(message)
        elif isinstance(message, Reply):
            self._on_reply(peer, message)
        elif isinstance(message, tuple):
            self.on_message(peer, message)
        else:
            self._arrive(peer, message)

    def _arrive(self, peer: int, payload: Any) -> None:
        if isinstance(payload, Carrier):
            self._meet(payload.reference.owner)
        self.group.references.arrive(Packet(peer, self.id, payload, True))

    def _meet(self, owner: int) -> None:
        """Notes the death of an owner that this worker never knew."""
        if owner != self.id and owner not in self.node.halves:
            self.group.references.lose(self.id, owner)

    def _on_request(self, request: Request) -> None:
        self.group.ran[request.caller, request.number] += 1
        assert self.group.ran[request.caller, request.number] == 1, f"{request} runs twice"
        self.running += 1
        for item in request.items:
            self._arrive(request.caller, item)
        self.node.clock.later(LONGEST_WORK_S * self.chance.random() ** 4, self._work, request)

    def _work(self, request: Request) -> None:
        self._drop_one()
        count = self.chance.choice((0, 0, 1, 2)) if request.depth < DEEPEST else 0
        self._waited_for[request] = set()
        for _ in range(count):
            number = self._call(request)
            if number is not None and number in self.calls.entries:
                self._waited_for[request].add(number)
        self._answer_if_complete(request)

    def _answer_if_complete(self, request: Request) -> None:
        if not self._waited_for[request]:
            items = self.group.captured(lambda: self._pack_result(request.caller))
            self.send(request.caller, Reply(request.number, items))
            self.running -= 1
            self.activity += 1

    def _pack_result(self, caller: int) -> None:
        for reference in self._some_held():
            self.group.references.hand_on(self.id, reference, caller)

    def _on_reply(self, peer: int, reply: Reply) -> None:
        entry = self.calls.pop(reply.number, None)
        for item in reply.items:
            if entry is None:
                self.group.references.refuse(self.id, item)
            else:
                self._arrive(peer, item)
        if entry is not None:
            self.group.answered += 1
            self._close(entry)

    def _fail(self, entry: OpenCall) -> None:
        assert entry.request is not None
        self.failed.append(entry.request)
        self.group.given_up.add(entry.request)
        for item in entry.request.items:
            if isinstance(item, Homecoming):
                self.group.references.end_call_home(item.number)
        self._close(entry)

    def _close(self, entry: OpenCall) -> None:
        """Continues after the end of a call."""
        self.activity += 1
        assert entry.request is not None
        parent = entry.request.parent
        if parent is not None and entry.request.number in self._waited_for[parent]:
            self._waited_for[parent].discard(entry.request.number)
            self._answer_if_complete(parent)

    def _tick(self) -> None:
        self.group.references.tick(self.id, self.node.clock.now_s)
        for entry in self.calls.take_expired(self.node.clock.now_s)[0]:
            self._fail(entry)
        self.on_tick()
        if self.id in self.group.members:
            self.node.clock.later(TICK_S, self._tick)

    def on_lost(self, peer: int, cause: str) -> None:
        self.group.references.lose(self.id, peer)
        for entry in self.calls.take_where(lambda call: call.worker == peer):
            self._fail(entry)
