"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.processes.test_hybrid_recovery import SERVERS, TRAINERS
from tests.processes.hybrid_internals import train_with_recovery
from torchweft import rpc
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

STEPS = 8


def train(directory: Path, **options: Any) -> list[Any]:
    return [
        rpc.rpc_async(
            name,
            train_with_recovery,
            (me, TRAINERS, SERVERS, str(directory), STEPS),
            kwargs=options,
        )
        for me, name in enumerate(TRAINERS)
    ]


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_server_killed_within_a_step_comes_back_and_the_run_has_the_same_bits(
    nursery: Nursery, tmp_path: Path
) -> None:
    with cluster(workers=4, nursery=nursery, restarts=3, check=False):
        expected = [call.wait() for call in train(tmp_path / "whole")]
        assert [opened for _, _, opened in expected] == [1, 1]
        for at in ("pass", "push"):
            calls = train(tmp_path / at, killed=SERVERS[1], at=at)
            for (state, made, opened), (same, steps, _) in zip(
                [call.wait() for call in calls], expected, strict=True
            ):
                assert opened == 2
                check_same(state, same)
                # The snapshot is of step 3; step 4 was not completed, or is made again.
                assert [number for number, _ in made[-5:]] == [3, 4, 5, 6, 7]
                assert made[-5:] == steps[-5:]
        # All steps are done: nothing is left to do, and the state is the saved one.
        for state, made, _ in [call.wait() for call in train(tmp_path / "pass")]:
            assert [number for number, _ in made] == [6, 7]
            check_same(state, expected[0][0])


def test_an_error_that_no_loss_has_caused_is_raised_and_the_model_is_closed(
    nursery: Nursery, tmp_path: Path
) -> None:
    with cluster(workers=3, nursery=nursery):
        given = (0, ["worker0"], ["worker1", "worker2"], str(tmp_path), STEPS)
        with pytest.raises(ValueError, match="a mistake of the program"):
            rpc.rpc_sync("worker0", train_with_recovery, given, kwargs={"at": "error"})
        _, made, opened = rpc.rpc_sync("worker0", train_with_recovery, given)
        assert opened == 1
        assert [number for number, _ in made] == [3, 4, 5, 6, 7]  # from the snapshot
