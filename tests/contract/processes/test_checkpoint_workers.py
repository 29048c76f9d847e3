"""Snapshots that are restored onto workers other than their writers, and lost workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.checkpoint_model import (
    Pair,
    Training,
    add_one,
    equal,
    linear,
    step_half,
    step_through,
)
from tests.contract.processes.functions import options, wait_until
from torchweft import checkpoint, rpc
from torchweft.errors import SnapshotNotFound
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=["Adam", "momentum"])
def test_training_goes_on_with_as_many_fewer_and_more_workers(
    nursery: Nursery, tmp_path: Path, kind: Any
) -> None:
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()):
        training = Training("worker0", "worker0", "worker1", kind=kind)
        training.train(3)
        checkpoint.save(tmp_path, training.state, step=3)
        expected = training.train(3), training.parameters()
    spreads = [
        (2, ("worker1", "worker0", "worker0"), "012"),
        (1, ("worker0", "worker0", "worker0"), "201"),
        (3, ("worker2", "driver", "worker1"), "120"),
    ]
    for workers, names, order in spreads:
        with torchweft.cluster(workers=workers, nursery=nursery, rpc_backend_options=options()):
            training = Training(*names, kind=kind, order=order)
            training.train(1)
            assert checkpoint.restore(tmp_path, training.state).step == 3
            assert training.state["done"] == 3
            losses = training.train(3)
            assert losses == expected[0]
            assert equal(training.parameters(), expected[1])


@pytest.mark.parametrize(
    "restrictions",
    [
        {
            "allowed_modules": (
                "torchweft.checkpoint",
                "torch",
                "tests.contract.processes.checkpoint_model",
            )
        },
        {
            "strict": True,
            "callables": (
                *(
                    *checkpoint.CALLABLES,
                    linear,
                    step_through,
                    add_one,
                    torch.optim.SGD,
                    torch.zeros,
                ),
            ),
        },
    ],
    ids=["allow-list", "strict"],
)
def test_workers_that_allow_little_take_part(
    nursery: Nursery, tmp_path: Path, restrictions: dict[str, Any]
) -> None:
    restricted = options(**restrictions)
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=restricted):
        training = Training("worker0", "worker1", "driver", kind=torch.optim.SGD)
        training.train(1)
        pair = Pair(checkpoint.StepGate())
        state = {**training.state, **pair.state()}
        checkpoint.save(tmp_path, state, step=1, gate=pair.gate)
        losses = training.train(2)
        arguments = (pair.gate.reference, pair.first, pair.second)
        rpc.rpc_sync("worker1", step_through, args=arguments)
        checkpoint.restore(tmp_path, state)
        training.state["done"] = state["done"]
        assert training.train(2) == losses
        assert float(pair.first.to_here()) == float(pair.second.to_here()) == 0


def test_a_file_on_the_disk_of_a_worker_that_is_gone_is_named(
    nursery: Nursery, tmp_path: Path
) -> None:
    directory = "/proc/self/cwd/snapshots"
    for name in ("driver", "worker0", "worker1"):
        (tmp_path / name).mkdir()
    here = os.getcwd()
    os.chdir(tmp_path / "driver")
    try:
        for workers in (2, 1):
            with torchweft.cluster(
                workers=workers, nursery=nursery, rpc_backend_options=options()
            ) as g:
                for name in g.names:
                    rpc.rpc_sync(name, os.chdir, args=(str(tmp_path / name),))
                state = {"a": RemoteModule(g.names[-1], linear, args=(0, 2, 2))}
                if workers == 2:
                    checkpoint.save(directory, state, step=1)
                    continue
                with pytest.raises(SnapshotNotFound) as caught:
                    checkpoint.restore(directory, state)
                text = str(caught.value)
                assert "worker 'worker0' lacks the file" in text
                assert "worker 'worker1', which wrote it, is not in the group now" in text
    finally:
        os.chdir(here)


def test_steps_of_a_lost_worker_do_not_keep_the_gate_open(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as cluster:
        pair = Pair(checkpoint.StepGate())
        things = (pair.gate, pair.first, pair.second)
        half = rpc.rpc_async("worker1", step_half, args=(*things, "never"))
        wait_until(lambda: float(pair.first.to_here()) == 1, lambda: "the step did not begin")
        os.kill(cluster.pids["worker1"], signal.SIGKILL)
        with pair.gate.closed(timeout=10):
            pass
        with pytest.raises(ConnectionError):
            half.wait()
        cluster.abandon()
