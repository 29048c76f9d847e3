"""Hybrid models whose server is killed within a step, and comes back: one call trains on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.processes.hybrid_functions import train_with_recovery, wait_in_reduction
from torchweft import rpc
from torchweft.errors import ConfigurationError
from torchweft.hybrid import recover
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS, SERVERS = ["worker0", "worker1"], ["worker2", "worker3"]
STEPS = 8
Trained = tuple[dict[str, Tensor], list[tuple[int, float]], int]


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


def test_a_trainer_that_waits_in_an_all_reduce_is_told_of_a_lost_server(
    nursery: Nursery,
) -> None:
    with cluster(workers=4, nursery=nursery, check=False):
        calls = [
            rpc.rpc_async(name, wait_in_reduction, (me, TRAINERS, SERVERS, SERVERS[1]))
            for me, name in enumerate(TRAINERS)
        ]
        for call in calls:
            error, worker, waited_s = call.wait()
            assert (error, worker) == ("WorkerLost", SERVERS[1])
            assert waited_s < 60  # The limit of the process group is 300 seconds.


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


@pytest.mark.parametrize("name", ["steps", "every", "attempts"])
def test_bad_numbers_are_named(name: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 3, "every": 1, "directory": tmp_path, name: -1}
    with pytest.raises(ConfigurationError, match=re.escape(f"{name} is -1")):
        recover(tuple, print, **given)
