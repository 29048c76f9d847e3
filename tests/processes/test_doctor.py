"""A running group is examined from one of its workers."""

from __future__ import annotations

import pytest
import torch

import torchweft
from tests.processes.embedding_functions import end_process
from torchweft import rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Nursery
from torchweft.observe.doctor import Level, examine

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


def set_torch_version(version: str) -> None:
    torch.__version__ = version  # type: ignore[assignment]


def test_another_torch_and_a_worker_that_cannot_be_called_are_named(nursery: Nursery) -> None:
    with torchweft.cluster(workers=2, nursery=nursery, check=False):
        pairs = [each for each in examine().findings if each.check == "pair"]
        assert len(pairs) == 6
        assert {each.level for each in pairs} == {Level.GOOD}
        rpc.rpc_sync("worker0", set_torch_version, ("2.0.0",))
        (error,) = [each for each in examine().findings if each.level is Level.ERROR]
        assert error.check == "versions"
        assert "2.0.0 on worker0" in error.text
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("worker1", end_process)
        errors = [each for each in examine().findings if each.level is Level.ERROR]
        assert [each.where for each in errors if each.check == "worker"] == ["worker1"]
        assert "WorkerLost" in errors[0].text
