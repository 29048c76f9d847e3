"""Tables without a model, whose server is killed within a step and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.processes.embedding_functions import train_tables_with_recovery
from torchweft import rpc
from torchweft.embedding import TableConfig, Tables, plan_tables, recover
from torchweft.errors import ArgumentTypeError, WorkerLost
from torchweft.launch import Nursery, cluster
from torchweft.testing import kill

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS, SERVERS = ["worker0", "worker1"], ["worker2", "worker3"]


def train(directory: Path, killed: str = "") -> list[Any]:
    calls = [
        rpc.rpc_async(
            name, train_tables_with_recovery, (me, TRAINERS, SERVERS, str(directory), killed)
        )
        for me, name in enumerate(TRAINERS)
    ]
    return [call.wait() for call in calls]


def test_tables_whose_server_is_killed_within_a_step_are_trained_on_with_the_same_bits(
    nursery: Nursery, tmp_path: Path
) -> None:
    with cluster(workers=4, nursery=nursery, restarts=1, check=False):
        expected = train(tmp_path / "whole")
        assert [opened for _, _, opened in expected] == [1, 1]
        found = train(tmp_path / "killed", killed=SERVERS[1])
        for (state, made, opened), (same, _, _) in zip(found, expected, strict=True):
            assert opened == 2
            assert made[-5:] == [3, 4, 5, 6, 7]  # The snapshot is of step 3.
            assert state.keys() == same.keys()
            assert all(torch.equal(state[name], same[name]) for name in state)
        with pytest.raises(ArgumentTypeError, match="with the HybridModel or the Tables first"):
            recover(lambda: (object(),), print, steps=1, directory=tmp_path, every=1)


@pytest.mark.usefixtures("quick_restarts")
def test_tables_whose_server_has_come_back_meanwhile_say_that_it_was_lost(
    nursery: Nursery,
) -> None:
    with cluster(workers=2, nursery=nursery, restarts=1, check=False) as group:
        tables = Tables(plan_tables([TableConfig("word", 20, 4)], group.names))
        kill(group, "worker0")
        group.wait_for("worker0")
        for use in (lambda: tables({"word": torch.arange(6).view(2, 3)}), tables.close):
            with pytest.raises(WorkerLost) as caught:
                use()
            assert caught.value.worker == "worker0"
