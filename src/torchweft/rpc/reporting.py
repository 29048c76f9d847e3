"""Makes the report of a worker: everything that it tells an observer, at this moment.

The tables of calls, references and passes exist anyway. They are copied in single steps, while the
threads that change them go on.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterable

import torch

from torchweft.errors import ProtocolError
from torchweft.protocol.greetings import HOST
from torchweft.protocol.observing.facts import FACTS, MEASURE, encode_facts
from torchweft.protocol.observing.keys import call_key, reference_key
from torchweft.protocol.observing.report import (
    DETAIL,
    METRICS,
    REPORT,
    WHO,
    Event,
    HeldReference,
    Identity,
    Member,
    OpenCall,
    Report,
    ServedCall,
    Traffic,
    encode,
)
from torchweft.protocol.served_calls import ServedCall as Served
from torchweft.rpc.activity import threads
from torchweft.rpc.completion import Call, key_of
from torchweft.rpc.counting import LEASE_S, METRICS_LEASE_S, Counting, name_of
from torchweft.rpc.examining import facts_of, measured_for_observer
from torchweft.rpc.health import health_of
from torchweft.rpc.stack_report import function_of, served_by
from torchweft.rpc.telling import TELLERS
from torchweft.rpc.worker import Worker
from torchweft.worker.agent import Agent
from torchweft.worker.calls import PendingCall
from torchweft.worker.peers import Peer

_MOST_CALLS = 500
"""Open calls, and served ones, that a report names; the oldest."""
_MOST_REFERENCES = 50
_MOST_MEASURED = 2000
_PAGE_BYTES = resource.getpagesize()


class Reporter:
    """Makes the reports of one worker. Thread-safe.

    Args:
        worker: The worker.
        counting: Counts its calls.
        group: The name of its group.
    """

    def __init__(self, worker: Worker, counting: Counting, group: str) -> None:
        self._worker = worker
        self._agent = worker.agent
        self._counting = counting
        self._group = group

    def identity(self) -> Identity:
        """Returns who this worker is, and which others it knows."""
        me = self._agent.me
        members = [self._member(peer) for peer in self._agent.members.known()]
        members.sort(key=lambda member: member.rank)
        return Identity(
            worker=me.name,
            rank=me.info.id,
            host=str(me.registration.facts.get(HOST, "")),
            pid=os.getpid(),
            group=self._group,
            program=me.registration.main,
            members=tuple(members),
        )

    def _member(self, peer: Peer) -> Member:
        found = health_of(self._agent, peer)
        cause = found.error.cause if found.error is not None else ""
        host = str(peer.registration.facts.get(HOST, ""))
        addresses = tuple(peer.registration.addresses)
        return Member(peer.name, peer.info.id, peer.id, host, addresses, found.state.value, cause)

    def report(self, question: str = REPORT) -> Report:
        """Returns the report.

        Args:
            question: ``DETAIL`` for stacks and references as well, ``METRICS`` for numbers alone:
                without calls and threads.
        """
        worker, reactor = self._worker, self._agent.reactor
        counts = worker.references.counts()
        in_detail, shows_calls = question == DETAIL, question != METRICS
        return Report(
            identity=self.identity(),
            clock_s=time.monotonic(),
            time=time.time(),
            cpu_s=time.process_time(),
            memory_bytes=_memory_bytes(),
            counted_since_s=self._counting.since_s,
            slots=reactor.limit,
            running=reactor.running,
            queued=len(reactor.tasks),
            traffic=tuple(self._traffic()),
            functions=self._counting.counts(),
            made=tuple(self._made()) if shows_calls else (),
            served=tuple(self._served()) if shows_calls else (),
            threads=tuple(threads(worker, with_frames=in_detail)) if shows_calls else (),
            owned=counts["owned"],
            held=counts["held"],
            references=tuple(self._references()) if in_detail else (),
            contexts=len(worker.contexts.ids()),
            passes=worker.engine.count_passes(),
            events=tuple(self._events()) if in_detail else (),
            numbers=tuple(self._agent.slots[TELLERS].told()),
            in_flight=len(self._agent.calls),
            serving=len(served_by(worker)),
        )

    def _traffic(self) -> Iterable[Traffic]:
        present = {peer.name for peer in self._agent.members.present()}
        found: dict[str, Traffic] = {}
        for peer in list(self._agent.peers.values()):
            link = peer.link
            if peer.is_self or link is None or peer.name not in present:
                continue
            # A worker that came back under its name is another peer: both are counted together.
            before = found.get(peer.name, Traffic(peer.name, 0, 0, {}))
            moved = Counter(before.by_channel)
            moved.update({name: count for name, count in peer.moved.copy().items() if count})
            sent, received = link.bytes_sent, link.bytes_received
            found[peer.name] = Traffic(
                peer.name, before.sent + sent, before.received + received, dict(moved)
            )
        return found.values()

    def _made(self) -> Iterable[OpenCall]:
        calls = sorted(self._agent.calls.all(), key=lambda call: call.started_s)
        return [self._open_call(call) for call in calls[:_MOST_CALLS]]

    def _open_call(self, call: PendingCall) -> OpenCall:
        key = call_key(self._agent.info.name, call.number)
        parent = call.parent
        parent_key = "" if parent is None else key_of(parent)
        name = name_of(call.function)
        return OpenCall(key, call.worker_name, name, call.elapsed_s, parent_key)

    def _served(self) -> Iterable[ServedCall]:
        return [self._served_call(call) for call in served_by(self._worker)[:_MOST_CALLS]]

    def _served_call(self, call: Served) -> ServedCall:
        makes = awaits = ""
        if isinstance(call, Call):
            if getattr(call, "owned", None) is not None:
                makes = reference_key(call.reference)
            awaited = getattr(call, "awaited", None)
            if awaited is not None and not awaited.is_ready:
                reference = self._worker.references.reference_of(awaited)
                awaits = "" if reference is None else reference_key(reference)
        return ServedCall(
            key=key_of(call),
            caller=call.peer.name,
            function=function_of(call),
            age_s=time.monotonic() - call.arrived_s,
            has_begun=call.frame is None,
            makes=makes,
            awaits=awaits,
        )

    def _references(self) -> Iterable[HeldReference]:
        keeper, peers = self._worker.references, self._agent.peers
        owned, held = keeper.inventory()
        measured = [
            (_size_of(value.value), reference)
            for reference, value in list(owned.items())[:_MOST_MEASURED]
        ]
        measured.sort(key=lambda pair: -pair[0])
        pairs = [*measured[:_MOST_REFERENCES], *((0, each) for each in held[:_MOST_REFERENCES])]
        return [
            HeldReference(
                reference_key(each), peers[each.owner].name, keeper.site(each), size_bytes
            )
            for size_bytes, each in pairs
        ]

    def _events(self) -> Iterable[Event]:
        now_s = time.monotonic()
        return [Event(now_s - at_s, text) for at_s, text in self._agent.events.all()]


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _size_of(value: object) -> int:
    """Returns the bytes of the tensors in a value: a tensor, a module, or a plain container."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout is torch.strided else 0
    if isinstance(value, torch.nn.Module):
        return _size_of_module(value, set())
    parts: list[object] = []
    if type(value) is dict:
        parts = list(value.copy().values())
    elif type(value) is list or type(value) is tuple:
        parts = list(value)
    return sum([_size_of(each) for each in parts if isinstance(each, torch.Tensor)])


def _size_of_module(module: torch.nn.Module, seen: set[int]) -> int:
    """Returns the bytes of a module's tensors in this process; those in ``seen`` are counted."""
    size_bytes = 0
    held = vars(module)  # A remote module refuses to be asked for its parameters.
    for each in (*held.get("_parameters", {}).values(), *held.get("_buffers", {}).values()):
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            size_bytes += each.nbytes
    return size_bytes + sum(
        [
            _size_of_module(each, seen)
            for each in held.get("_modules", {}).values()
            if each is not None
        ]
    )


class Observers:
    """Answers the observers of one worker. Thread-safe.

    Args:
        agent: The worker's agent.
        reporter: Makes the reports.
        counting: Counts the worker's calls while it is observed.

    Attributes:
        counting: The argument.
    """

    def __init__(self, agent: Agent, reporter: Reporter, counting: Counting) -> None:
        self._agent = agent
        self._reporter = reporter
        self.counting = counting

    def answer(self, question: str) -> bytes:
        """Returns the answer to a question; raises ProtocolError if there is no such question."""
        if question == WHO:
            return encode(self.identity())
        if question == FACTS:
            return encode_facts(facts_of(self._agent)).encode()
        if question.startswith(MEASURE):
            callee = question.removeprefix(MEASURE)
            return encode_facts(measured_for_observer(self._agent, callee)).encode()
        if question not in (REPORT, DETAIL, METRICS):
            raise ProtocolError(f"an observer asks {question!r}")
        return encode(self.report(question))

    def report(self, question: str) -> Report:
        """Returns a report, and has calls counted until the next one is due."""
        self.counting.extend(METRICS_LEASE_S if question == METRICS else LEASE_S)
        return self._reporter.report(question)

    def identity(self) -> Identity:
        """Returns who this worker is, and which others it knows."""
        return self._reporter.identity()
