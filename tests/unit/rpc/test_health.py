from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.agent.group import group_of
from torchweft.agent import current
from torchweft.errors import WorkerLost
from torchweft.rpc.health import info_of


def test_a_worker_is_found_by_id_until_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(2) as (first, second):
        peer = first.peer(second)
        # The id differs from the rank, as for a worker that has come back.
        agent = SimpleNamespace(peers={16384: peer})
        monkeypatch.setattr(current, "_current", agent)
        assert info_of(16384) == peer.info
        peer.declare_lost("killed")
        with pytest.raises(WorkerLost, match="killed"):
            info_of(16384)
