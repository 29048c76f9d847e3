from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.unit.engine.worker.group import group_of
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker import current
from torchweft.engine.worker.peers import Members, Peer
from torchweft.errors import WorkerLost
from torchweft.rpc.observed import info_of, on_worker_lost


def test_a_worker_is_found_by_id_until_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(2) as (first, second):
        peer = first.peer(second)
        # The id differs from the rank, as for a worker that has come back.
        agent = SimpleNamespace(peers={16384: peer})
        monkeypatch.setattr(current, "here", agent)
        assert info_of(16384) == peer.info
        peer.declare_lost("killed")
        with pytest.raises(WorkerLost, match="killed"):
            info_of(16384)


def test_who_listens_after_a_worker_has_come_back_is_not_told_of_its_former_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registrations = [Registration(name, rank, ("unix:@x",)) for rank, name in enumerate("abc")]
    members = Members(registrations[0], registrations[1:], is_open=True)
    listeners: list[Callable[[Peer], None]] = []
    agent = SimpleNamespace(
        members=members,
        peers=members.by_id,
        on_lost=listeners.append,
        off_lost=listeners.remove,
        reactor=SimpleNamespace(submit=lambda work, peer: work(peer, None)),
    )
    monkeypatch.setattr(current, "here", agent)
    early, late = list[str](), list[str]()
    on_worker_lost(lambda error: early.append(str(error)))
    former, other = members.find("b"), members.find("c")
    other.declare_lost("killed")
    again, _ = members.join(Registration("b", 16384, ("unix:@x",), later_rank=1))
    on_worker_lost(lambda error: late.append(str(error)))
    for peer, cause in ((former, "replaced"), (again, "killed")):
        peer.declare_lost(cause)
        for listener in listeners:
            listener(peer)
    assert [text.rpartition(" ")[2] for text in early] == ["replaced", "killed"]
    assert [text[:10] for text in late] == ["worker 'c'", "worker 'b'"]
    assert late[1].endswith("killed")
