"""Hybrid models whose server is killed within a step, and comes back: one call trains on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.contract.processes.hybrid_functions import wait_in_reduction
from torchweft import rpc
from torchweft.errors import ConfigurationError
from torchweft.hybrid import recover
from torchweft.launch import Nursery, cluster

# A process group has threads and connections of its own.
pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
TRAINERS, SERVERS = ["worker0", "worker1"], ["worker2", "worker3"]
Trained = tuple[dict[str, Tensor], list[tuple[int, float]], int]


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


@pytest.mark.parametrize("name", ["steps", "every", "attempts"])
def test_bad_numbers_are_named(name: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 3, "every": 1, "directory": tmp_path, name: -1}
    with pytest.raises(ConfigurationError, match=re.escape(f"{name} is -1")):
        recover(tuple, print, **given)
