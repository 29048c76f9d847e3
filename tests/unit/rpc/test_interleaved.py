"""A worker is lost, or a message comes, between two steps of the thread that notes a wait."""

from __future__ import annotations

import queue
import select
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.engine.worker.group import LIMIT_S, group_of
from torchweft.engine.protocol.leaving import OpenLeaving
from torchweft.engine.threads.reports import LongWaits
from torchweft.engine.worker import current
from torchweft.engine.worker.peers import Peer
from torchweft.errors import WorkerLost
from torchweft.rpc.codec import Encoder
from torchweft.rpc.collective import Gatherings, Key, Limits
from torchweft.rpc.node import Leaving
from torchweft.rpc.observed import on_worker_lost
from torchweft.rpc.ports import Listener

LIMITS = Limits(LIMIT_S, LIMIT_S)


def nothing(*_: object) -> None: ...


def test_a_gathering_that_has_ended_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last worker arrives between the loss of a worker that has arrived and its report."""
    key, told = Key((0, 1), "barrier", 0), list[Peer]()
    with group_of(2) as (first, second):
        led = Gatherings(first.agent, LongWaits("worker0"))
        monkeypatch.setattr(led, "_tell_failure", lambda key, peer, error: told.append(peer))
        gathering = led._found(key, key.workers)
        for member in (first, second):
            led.brought(key, first.peer(member), 1)
        lost = WorkerLost("gone", worker="worker1")
        led._fail(key, gathering, first.peer(second), lost)
        assert gathering.values() == {"worker0": 1, "worker1": 1}
        assert told == []


@pytest.mark.parametrize("is_reported_before", [True, False])
def test_a_leader_that_is_lost_as_a_gathering_begins(
    monkeypatch: pytest.MonkeyPatch, is_reported_before: bool
) -> None:
    """The report of the loss comes before the gathering is registered, or after."""
    with group_of(2) as (leader, member):
        gatherings = Gatherings(member.agent, LongWaits("worker1"))
        peer = member.peer(leader)

        def lose() -> None:
            peer.declare_lost("killed")
            gatherings.peer_lost(peer)

        if is_reported_before:
            lose()
        monkeypatch.setattr(gatherings, "_bring", lambda *_: is_reported_before or lose())
        with pytest.raises(WorkerLost, match="killed"):
            gatherings.gather(None, [peer, member.agent.me], "barrier", LIMITS)
        assert len(gatherings) == 0


class Owner:
    """The owner of a port, whose wait stands still at a point while a message comes.

    Args:
        point: Where it stands still; see the calls of ``_at``.
    """

    def __init__(self, point: str) -> None:
        self._point = point
        self.inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.has_seen = False
        reactor = SimpleNamespace(unarmed={}, leave_unarmed=nothing, arm=nothing)
        waiter = SimpleNamespace(lease=self._lease, read=self._read)
        agent: Any = SimpleNamespace(waiter=waiter, reactor=reactor, receiver=None)
        self.listener = Listener(agent, 1, self.inbox)
        self.peer: Any = SimpleNamespace(link=SimpleNamespace(read_fd=-1), lost=None)

    def _at(self, point: str) -> None:
        if point == self._point:
            sender = threading.Thread(target=self._send)
            sender.start()
            sender.join(LIMIT_S)

    def _send(self) -> None:
        self.inbox.put("message")
        self.listener.wake()

    def _lease(self, peers: object) -> object:
        self._at("before it notes that it waits")
        return SimpleNamespace(release=nothing)

    def _read(
        self,
        lease: object,
        wanted: object,
        spins: object,
        deadline_s: float,
        is_over: Any,
        *rest: Any,
    ) -> bool:
        self._at("before it looks")
        self.has_seen = bool(is_over())
        self._at("after it has looked")
        ready = select.poll()
        ready.register(rest[-1], select.POLLIN)
        self.is_woken = bool(ready.poll(0))
        return False

    def wait(self) -> None:
        self.listener.wait(self.peer, time.monotonic() + LIMIT_S, list)
        self.listener.close()


@pytest.mark.parametrize(
    ("point", "is_seen"),
    [
        ("before it notes that it waits", True),
        ("before it looks", True),
        ("after it has looked", False),
    ],
)
def test_the_owner_of_a_port_misses_no_message(point: str, is_seen: bool) -> None:
    owner = Owner(point)
    owner.wait()
    assert owner.has_seen is is_seen
    assert owner.has_seen or owner.is_woken
    assert owner.inbox.get_nowait() == "message"


def test_a_member_that_is_lost_as_this_worker_learns_of_it_is_not_awaited() -> None:
    """The machine hears of the loss before it knows the member."""
    machine = OpenLeaving()
    machine.begin()

    def lose(peer: Any, action: object) -> None:
        peer.lost = WorkerLost("gone", worker="b")

    leaving: Any = SimpleNamespace(_lock=threading.RLock(), _machine=machine, _tell=lose)
    leaving.peer_lost = lambda peer: machine.member_lost(peer.id)
    member: Any = SimpleNamespace(id=1, is_self=False, lost=None)
    leaving.peer_lost(member)
    Leaving._on_member(leaving, member)
    assert machine.missing().workers == ()


def test_a_loss_during_the_registration_of_a_callback_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[WorkerLost] = []
    with group_of(2) as (first, second):
        agent, peer = first.agent, first.peer(second)
        register = agent.on_lost

        def lose_meanwhile(tell: Any) -> None:
            register(tell)
            peer.declare_lost("killed")
            agent.tell_watchers(peer)

        monkeypatch.setattr(agent, "on_lost", lose_meanwhile)
        monkeypatch.setattr(agent.reactor, "submit", lambda work, first=None: work(first, None))
        monkeypatch.setattr(current, "here", agent)
        on_worker_lost(told.append)
        assert [error.worker for error in told] == ["worker1"]


@pytest.mark.parametrize("is_lost", [True, False])
def test_no_record_of_a_graph_is_left_of_a_worker_that_is_lost_meanwhile(is_lost: bool) -> None:
    kept: set[int] = set()
    peer: Any = SimpleNamespace(id=1, lost=None)

    def record(tensors: object, peer_id: int, is_answer: bool) -> int:
        if is_lost:
            peer.lost = WorkerLost("gone", worker="b")  # Its records have just been dropped.
        kept.add(7)
        return 7

    outside = SimpleNamespace(record_send=record, take_back=kept.remove)
    encoder: Any = SimpleNamespace(_arrivals=SimpleNamespace(keeps_graphs=True), _outside=outside)
    computed = torch.ones(2, requires_grad=True) * 2
    assert Encoder._record_outside(encoder, [computed], peer, False) == 7
    assert kept == (set() if is_lost else {7})
