"""A strict worker between an honest worker and hostile ones: all of their code but the sockets.

The honest worker leads the group, makes calls, values, references and backward passes, and answers
the strict worker's calls. Hostile members send the strict worker anything in between: before each
message that one of the two takes. Each message goes through bytes and the parser of frames. All of
it runs in this thread: a worker that waits has the others work.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any
from unittest import mock

import torch

from tests.fuzz.strict import program
from torchweft import autograd
from torchweft.autograd.engine import ENGINE
from torchweft.autograd.passes import LedPass
from torchweft.engine.codec.reading import make_reader
from torchweft.engine.protocol.leaving import Stage
from torchweft.engine.protocol.registration import STRICT, Registration
from torchweft.engine.threads.reactor import Reactor
from torchweft.engine.threads.reports import LongWaits
from torchweft.engine.wire.frames import Buffer, FrameParser
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Agent, Protection
from torchweft.engine.worker.peers import Members, Peer
from torchweft.errors import ProtocolError
from torchweft.rpc import RpcBackendOptions, RRef, remote, rpc_sync, serving
from torchweft.rpc.collective import GATHERINGS, Gatherings
from torchweft.rpc.node import Leaving
from torchweft.rpc.sources import SOURCES, Sources
from torchweft.rpc.worker import WORKER, Worker

HONEST, VICTIM, FIRST = 0, 1, 2
HOSTILE = 6
"""How many hostile members the group has. One that was turned away is replaced by a new life."""
_LIMIT_S = 60.0
_LIMIT_BYTES = 1 << 20
_FORGIVEN = 8
"""A refused message had no effect. Only after so many the sender is turned away: making a new life
takes as long as ten messages."""
_STEPS = 10_000
_COLLECTIONS = 4


class Queue(list[Any]):
    """Waiting tasks of all senders, in one list."""

    ready = 0

    def append(self, task: Any, sender: int = 0) -> None:
        super().append(task)

    def offer(self, task: Any, sender: int, size_bytes: int) -> bool:
        self.append(task)
        return True


class Way:
    """One direction of a connection: the messages on it, and the parser at its end."""

    read_fd = write_fd = -1
    is_free = is_broken = False
    watcher = native = None
    serves = expects_usual = False

    def __init__(self, queue: deque[tuple[Way, bytes]] | None) -> None:
        self._queue = queue
        self.parser = parser()

    def send(self, message: Sequence[Buffer], *, may_block: bool) -> None:
        if self._queue is not None:
            self._queue.append((self, b"".join(message)))

    def hold(self, parts: Sequence[Buffer]) -> int:
        self.send(parts, may_block=False)
        return 0

    def flush(self) -> None: ...


def parser() -> FrameParser:
    """Returns the parser of a new connection."""
    size_bytes = 1 << 16
    return FrameParser(
        lambda size: memoryview(bytearray(size)), size_bytes, _LIMIT_BYTES, _LIMIT_BYTES
    )


class Member:
    """One worker of the group.

    Args:
        me: Its number.
        registrations: All members.
        pump: Has all workers do what they have to do until a condition holds.
    """

    def __init__(
        self,
        me: int,
        registrations: Sequence[Registration],
        pump: Callable[[Callable[[], bool]], None],
    ) -> None:
        others = [each for each in registrations if each.id != me]
        options = RpcBackendOptions(strict=True, callables=program.CALLABLES, secret=None)
        options.check()
        members = Members(registrations[me], others, is_open=False)
        with mock.patch.object(Reactor, "_spawn"):
            self.agent = Agent(Protection.of_run("a token of this run"), members, [], 4, _LIMIT_S)
        agent = self.agent
        agent.reactor.tasks = Queue()  # type: ignore[assignment]
        reader = make_reader(None, True, registrations[me].name, options.callables)
        self.worker = Worker(agent, options.reference_type, reader)
        serving.install(self.worker)
        agent.slots[WORKER], agent.slots[ENGINE] = self.worker, self.worker.engine
        self.gatherings = agent.slots[GATHERINGS] = Gatherings(agent, LongWaits("worker"))
        self.sources = agent.slots[SOURCES] = Sources(agent, lambda source: None)
        self.leaving = Leaving(self.worker, LongWaits("me"))
        agent.when_lost = self._peer_lost
        agent.links.end = lambda link: None  # type: ignore[method-assign, assignment]
        agent.connect_all = lambda *args, **kwargs: None  # type: ignore[method-assign]
        calls: Any = agent.calls
        calls._wait_for_others = lambda call: pump(lambda: call.is_done)

    def work(self) -> bool:
        """Does the work that waits; returns whether there was any."""
        reactor: Any = self.agent.reactor
        has_worked = False
        while reactor.urgent or reactor.tasks:
            queue = reactor.urgent or reactor.tasks
            function, first, second = queue.pop() if queue is reactor.urgent else queue.pop(0)
            Context().run(function, first, second)  # As threads of the reactor do.
            has_worked = True
        for source in self.sources.open():
            while source.is_asked and source.answer_next():
                has_worked = True
        return has_worked

    def tick(self) -> None:
        """Lets a second pass for what is sent in batches."""
        now_s = time.monotonic() + 1
        self.worker.references.tick(now_s)
        self.worker.engine.tick(now_s)

    def _peer_lost(self, peer: Peer) -> None:
        self.worker.tensor_messages.peer_lost(peer)
        self.gatherings.peer_lost(peer)
        self.worker.engine.peer_lost(peer)
        self.agent.calls.caller_lost(peer)
        self.sources.peer_lost(peer)
        self.worker.references.peer_lost(peer)
        self.agent.calls.end_creations(self.worker.unfinished, peer)
        self.leaving.peer_lost(peer)

    def close(self) -> None:
        """Ends the worker."""
        current_agent.install(self.agent)
        self.worker.has_left = True
        with contextlib.suppress(Exception):
            self.gatherings.close()
        self.worker.references.close()
        self.sources.close(0.0)
        self.worker.close(1.0)
        for peer in self.agent.peers.values():
            peer.link = None
        self.agent.close(1.0)
        current_agent.install(None)


class Trio:
    """The group.

    Args:
        attack: Returns the next messages of the hostile members; empty for none.
    """

    def __init__(self, attack: Callable[[], Sequence[bytes]]) -> None:
        names = ["honest", "victim", *(f"hostile{number}" for number in range(HOSTILE))]
        registrations = [
            Registration(name, number, (), facts={STRICT: True})
            for number, name in enumerate(names)
        ]
        self._attack = attack
        self._queue: deque[tuple[Way, bytes]] = deque()
        self._waiting = mock.patch.object(LedPass, "_wait_for_others", self._wait_in)
        self._waiting.start()
        self.honest = Member(HONEST, registrations, self._pump)
        self.victim = Member(VICTIM, registrations, self._pump)
        self._at = self.honest
        to_victim, to_honest, nowhere = Way(self._queue), Way(self._queue), Way(None)
        self._ends = {
            id(to_victim): (self.victim, self.victim.agent.peers[HONEST]),
            id(to_honest): (self.honest, self.honest.agent.peers[VICTIM]),
        }
        self.honest.agent.peers[VICTIM].link = to_victim  # type: ignore[assignment]
        self.victim.agent.peers[HONEST].link = to_honest  # type: ignore[assignment]
        for number in range(FIRST, FIRST + HOSTILE):
            self.victim.agent.peers[number].link = nowhere  # type: ignore[assignment]
        self.hostile = FIRST
        """The hostile member that sends now."""
        self.refused = self.sent = 0
        self._nowhere = nowhere
        self._parser = parser()
        self._enter(self.honest)

    def _enter(self, member: Member) -> None:
        self._at = member
        current_agent.install(member.agent)

    @contextlib.contextmanager
    def _as(self, member: Member) -> Any:
        before = self._at
        self._enter(member)
        try:
            yield
        finally:
            self._enter(before)

    @property
    def _wait_in(self) -> Callable[[LedPass], None]:
        return lambda led: self._pump(lambda: bool(led.inbox or led.outcome))

    def _pump(self, is_done: Callable[[], bool]) -> None:
        for _ in range(_STEPS):
            if is_done():
                return
            if not self._step():
                raise AssertionError(f"worker {self._at.agent.info.name!r} waits for ever")
        raise AssertionError("messages go to and fro without end")

    def _step(self) -> bool:
        """Delivers a message, and has its receiver work; returns whether there was any."""
        for data in self._attack():
            self.deliver_hostile(data)
        if not self._queue:
            worked = []
            for member in (self.victim, self.honest):
                with self._as(member):
                    worked.append(member.work())
            return any(worked) or bool(self._queue)
        way, data = self._queue.popleft()
        member, peer = self._ends[id(way)]
        with self._as(member):
            for frame in _frames(way.parser, data):
                assert peer.lost is None, f"two honest workers cut each other: {peer.lost}"
                member.agent.receiver.dispatch(peer, frame)
            member.work()
        return True

    def deliver_hostile(self, data: bytes) -> None:
        """Delivers a message of a hostile member, which another takes the place of if refused."""
        victim, peer = self.victim, self.victim.agent.peers[self.hostile]
        self.sent += 1
        with self._as(victim):
            frames: list[Any] = []
            try:
                frames = _frames(self._parser, data)
            except ProtocolError as error:
                self._parser = parser()
                self._refuse(peer, error)
            for frame in frames:
                try:
                    victim.agent.receiver.dispatch(peer, frame)
                except ProtocolError as error:
                    self._refuse(peer, error)
            victim.work()
        if peer.lost is not None:
            self._replace(peer)

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        """Turns a hostile member away; mostly lets it go on, as if it had come again at once."""
        self.refused += 1
        if self.refused % _FORGIVEN == 0:
            self.victim.agent.receiver.turn_away(peer, error)

    def _replace(self, peer: Peer) -> None:
        """Has a new life come for a hostile member, and the next one go on."""
        members = self.victim.agent.members
        fresh = members._make(peer.registration)
        fresh.link = self._nowhere  # type: ignore[assignment]
        with self._as(self.victim):
            members._tell(fresh)
        members.by_id[peer.id] = members.by_name[peer.name] = members._by_rank[peer.id] = fresh
        self.hostile = FIRST + (self.hostile - FIRST + 1) % HOSTILE

    def settle(self) -> None:
        """Has all workers work until nothing is left to do."""
        for _ in range(6):
            for member in (self.honest, self.victim):
                with self._as(member):
                    member.tick()
            while self._step():
                pass

    # What the honest worker does, and has

    def round(self, number: int) -> None:
        """Makes calls, values, references and passes; checks all results."""
        self._enter(self.honest)
        ones = torch.full((3,), float(number % 7 + 1))
        (values, named) = rpc_sync("victim", program.identity, args=(number, ones), kwargs={"a": 5})
        assert (values[0], named) == (number, {"a": 5}), "another result"
        assert torch.equal(values[1], ones), "another result"
        assert rpc_sync("victim", program.ask, args=("honest", number)) == number, "another answer"
        self._use_references(number)
        self._run_pass(number)
        self._run_pass_outside(number)
        self.settle()
        self.check()

    def _use_references(self, number: int) -> None:
        counter = remote("victim", program.Counter)
        assert counter.rpc_sync().add() == 1, "another has used the value"
        own = RRef(number)
        ((back, same), _) = rpc_sync("victim", program.identity, args=(own, counter))
        assert back.to_here() == number, "another value"
        assert same.rpc_sync().add() == 2, "another has used the value"

    def _run_pass(self, number: int) -> None:
        weight = torch.full((3,), float(number % 5 + 1), requires_grad=True)
        with autograd.context() as context_id:
            product = rpc_sync("victim", torch.mul, args=(weight, 3.0))
            total = rpc_sync("victim", program.add, args=(product * 2, weight)).sum()
            autograd.backward(context_id, [total])
            gradient = autograd.get_gradients(context_id)[weight]
        assert torch.equal(gradient, torch.full((3,), 7.0)), f"another gradient: {gradient}"

    def _run_pass_outside(self, number: int) -> None:
        weight = torch.full((3,), float(number % 5 + 1), requires_grad=True)
        total = rpc_sync("victim", torch.mul, args=(weight * 2, 3.0)).sum()
        autograd.backward(total)
        assert weight.grad is not None, "no gradient"
        assert torch.equal(weight.grad, torch.full((3,), 6.0)), f"another: {weight.grad}"

    def check(self) -> None:
        """Checks that the honest worker has, and is, what it has and is in a group of its own."""
        found = self.standing()
        for _ in range(_COLLECTIONS):
            if found == STANDING:
                break
            gc.collect()  # A graph that is in a cycle may hold one of the other worker.
            self.settle()
            found = self.standing()
        assert found == STANDING, f"{found} instead of {STANDING}"

    def standing(self) -> dict[str, object]:
        """Returns what two workers keep of the honest one, and whether they trust each other."""
        honest, victim = self.honest.worker, self.victim.worker
        of_victim, held = victim.references.inventory()
        calls = [call for call in victim.agent.calls._client.all() if call.worker == HONEST]
        leaks = victim.references._machine.leaks()
        users = {leak.reference: leak.users for leak in leaks}
        # Hostile members may use values whose numbers they know, and so may hold them.
        kept = {each.reference for each in leaks if each.users or each.handles or each.handovers}
        contexts = [each >> 48 for each in victim.contexts.ids()]
        return {
            "lost": [self.victim.agent.peers[HONEST].lost, self.honest.agent.peers[VICTIM].lost],
            "leaving": [self.victim.leaving._machine.stage, self.victim.agent.lifetime.is_leaving],
            "values": [each for each in of_victim if each.creator == HONEST and each not in kept],
            "references": [each for each in held if each.owner == HONEST],
            "of the honest": [
                each for each in honest.references.inventory()[0] if each not in kept
            ],
            "held by the honest": honest.references.counts()["held"],
            "requests": honest.references.census()[2:],
            "users": [reference for reference, of_it in users.items() if HONEST in of_it],
            "calls": len(calls) + len(honest.agent.calls),
            "served": len(victim.agent.peers[HONEST].served),
            "contexts": [len(honest.contexts.ids()), contexts.count(VICTIM)],
            "passes": [
                honest.engine.count_passes(),
                # A hostile member may make up parts in contexts of its own, whoever these name: a
                # worker that it alone leads to a pass of another looks the same.
                *(key for key in victim.engine.passes.parts if key[1] in honest.contexts._released),
                *(key for key in victim.engine.passes.parts if key[0] >> 48 == VICTIM),
            ],
            "graphs": [
                *honest.engine.outside.count(),
                *(each for each in victim.engine.outside.sends() if each.to_worker == HONEST),
            ],
            "unfinished": len(honest.unfinished),
        }

    def close(self) -> None:
        """Ends the workers."""
        self._attack = tuple
        self._queue.clear()
        self._waiting.stop()
        self.honest.close()
        self.victim.close()


STANDING: dict[str, object] = {
    "lost": [None, None],
    "leaving": [Stage.MEMBER, False],
    "values": [],
    "references": [],
    "of the honest": [],
    "held by the honest": 0,
    "requests": (0, 0, 0),
    "users": [],
    "calls": 0,
    "served": 0,
    "contexts": [0, 0],
    "passes": [0],
    "graphs": [0, 0],
    "unfinished": 0,
}
"""As ``standing`` is in a group without hostile members; a test compares them."""


def _frames(parser: FrameParser, data: bytes) -> list[Any]:
    frames: list[Any] = []
    at = 0
    while at < len(data):
        space = parser.space()[0]
        piece = data[at : at + len(space)]
        space[: len(piece)] = piece
        at += len(piece)
        frames += parser.received(len(piece))
    return frames
