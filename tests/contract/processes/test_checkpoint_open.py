"""A worker of an open group dies and comes back: its part is restored, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.processes.checkpoint_model import Training, equal
from tests.open_workers import OpenWorkers, WarmProcess
from torchweft import checkpoint, rpc
from torchweft.errors import WorkerLost
from torchweft.nn import RemoteModule

pytestmark = pytest.mark.timeout(60)
NAMES = ("driver", "first", "second")


@pytest.fixture(scope="module")
def warm(warm_process: WarmProcess) -> Iterator[OpenWorkers]:
    # Making the first optimizer imports dynamo, which takes a second.
    started = OpenWorkers(
        warm_process, "torch._dynamo", "tests.contract.processes.checkpoint_model"
    )
    yield started
    started.close()


def join(name: str, rank: int, method: str) -> None:
    options = rpc.RpcBackendOptions(init_method=method, init_timeout=10.0, rpc_timeout=15.0)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


_kept: dict[str, Any] = {}


def train_and_save(directory: str) -> None:
    training = _kept["training"] = Training("first", "second", "second")
    _kept["gate"] = rpc.rpc_sync("second", checkpoint.StepGate)
    training.train(2)
    checkpoint.save(directory, training.state, step=2)
    _kept["losses"] = training.train(3)
    _kept["parameters"] = training.parameters()


def go_on(directory: str) -> set[str]:
    """Uses values of the dead worker, then restores them; returns the workers that errors name."""
    former, gate = _kept.pop("training"), _kept.pop("gate")
    errors = set()
    for use in (
        lambda: former.layers[1](torch.ones(1, 6)),
        lambda: former.train(1),
        lambda: former.layers[1].state_dict(),
        lambda: gate.step().__enter__(),
    ):
        with pytest.raises(WorkerLost) as caught:
            use()
        errors.add(caught.value.worker)
    training = Training("first", "second", "second")
    checkpoint.restore(directory, training.state)
    assert training.train(3) == _kept["losses"]
    assert equal(training.parameters(), _kept["parameters"])
    again = RemoteModule.init_from_module_rref("second", training.layers[1].module_rref)
    assert again.on == "second"
    return errors


def test_a_worker_that_came_back_gets_its_part_again(warm: OpenWorkers, tmp_path: Path) -> None:
    method, directory = f"file://{tmp_path}/store", str(tmp_path / "snapshots")
    try:
        for rank, name in enumerate(NAMES):
            warm.do(name, join, name, rank, method)
        warm.do("driver", train_and_save, directory)
        warm.kill("second")
        warm.do("second", join, "second", 2, method)
        assert warm.do("driver", go_on, directory) == {"second"}
    finally:
        for name in NAMES:
            warm.kill(name)
