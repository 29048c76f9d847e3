"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.processes.checkpoint_model import (
    Pair,
    Training,
    equal,
    last_file,
    limit_files,
    linear,
    step_half,
    step_often,
)
from tests.contract.processes.functions import open_gate, raised_by, wait_until
from tests.processes.checkpoint_model_internals import count_held, saved_numbers, write_when_let
from torchweft import checkpoint, rpc
from torchweft.checkpoint import owners
from torchweft.engine.worker.current import current
from torchweft.errors import (
    CallTimeout,
    CheckpointError,
    SnapshotCorrupt,
    StateMismatch,
)
from torchweft.launch import Cluster
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
]


def assert_nothing_held(group: Cluster) -> None:
    """Waits until the owners have been told that the driver has no references to parts any more."""

    def held() -> list[int]:
        return [rpc.rpc_sync(name, count_held) for name in [group.name, *group.names]]

    wait_until(lambda: not any(held()), lambda: f"parts are held: {held()}")


@pytest.fixture
def saved(group: Cluster, tmp_path: Path) -> Iterator[Training]:
    """Two snapshots, of steps 1 and 2; nothing has been trained since."""
    training = Training("worker0", "worker1", "driver")
    for step in (1, 2):
        training.train(1)
        checkpoint.save(tmp_path, training.state, step=step)
    yield training
    vars(training).clear()  # pytest holds the fixture for longer, and it has references.


@pytest.mark.parametrize("damage", ["flipped", "cut", "manifest", "no manifest"])
def test_a_damaged_snapshot_is_refused_and_the_one_before_is_named(
    group: Cluster, saved: Training, tmp_path: Path, damage: str
) -> None:
    path = last_file(tmp_path, "manifest.json" if "manifest" in damage else "1-worker0.pt")
    data = bytearray(path.read_bytes())
    if damage == "manifest":
        path.write_bytes(data.replace(b'"done"', b'"dome"'))
    elif damage == "no manifest":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    saved.train(1)
    before = saved.parameters()
    with pytest.raises(SnapshotCorrupt, match=r"damaged.*step=") as caught:
        checkpoint.restore(tmp_path, saved.state)
    assert caught.value.alternatives == (1,)
    assert caught.value.file == str(path)
    assert equal(saved.parameters(), before)
    assert saved.state["done"] == 3
    assert_nothing_held(group)
    assert checkpoint.restore(tmp_path, saved.state, step=1).step == 1
    assert saved.state["done"] == 1


def test_another_state_is_refused_before_anything_changes(
    group: Cluster, saved: Training, tmp_path: Path
) -> None:
    saved.train(1)
    before = saved.parameters()
    layers = saved.state["layers"]
    wide = RemoteModule("worker1", linear, args=(0, 6, 7))
    with pytest.raises(StateMismatch) as caught:
        checkpoint.restore(tmp_path, {**saved.state, "layers": [layers[0], wide, layers[2]]})
    assert "layers/1:weight has shape (5, 6) in the snapshot and (7, 6) here" in str(caught.value)
    parameters = [p for layer in layers for p in layer.remote_parameters()]
    other = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    with pytest.raises(StateMismatch, match=r"optimizer is of the class Adam.* and SGD here"):
        checkpoint.restore(tmp_path, {**saved.state, "optimizer": other})
    with pytest.raises(StateMismatch) as caught:
        checkpoint.restore(tmp_path, {"layers": layers[:2], "doing": 1})
    assert caught.value.missing == ("doing",)
    assert caught.value.unexpected == ("done", "layers/2", "optimizer")
    assert equal(saved.parameters(), before)
    assert_nothing_held(group)
    partly = {"layers": layers[:2], "doing": 1}
    checkpoint.restore(tmp_path, partly, strict=False)
    assert partly["doing"] == 1
    now = saved.parameters()
    assert [torch.equal(*pair) for pair in zip(now, before, strict=True)] == [False] * 4 + [
        True
    ] * 2


def test_a_state_is_copied_onto_other_workers(group: Cluster, saved: Training) -> None:
    moved = Training("worker1", "driver", "worker0", order="201")
    moved.train(1)
    checkpoint.copy_state(saved.state, moved.state)
    assert moved.state["done"] == 2
    assert equal(moved.parameters(), saved.parameters())
    assert_nothing_held(group)
    assert moved.train(3) == saved.train(3)
    before = moved.parameters()
    with pytest.raises(StateMismatch, match=r"the source is of another state: .*lacks other"):
        checkpoint.copy_state(saved.state, {**moved.state, "other": torch.ones(1)})
    assert equal(moved.parameters(), before)
    assert_nothing_held(group)


@pytest.mark.parametrize("worker", ["worker1", "driver"])
def test_a_full_disk_leaves_the_snapshots_before_and_nothing_else(
    group: Cluster, saved: Training, tmp_path: Path, worker: str
) -> None:
    present = sorted(path.name for path in tmp_path.iterdir())
    former = rpc.rpc_sync(worker, limit_files, args=(2000,))
    try:
        with pytest.raises(CheckpointError, match=f"step 3 failed on worker '{worker}'") as caught:
            checkpoint.save(tmp_path, saved.state, step=3)
    finally:
        rpc.rpc_sync(worker, limit_files, args=(former,))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.worker == worker
    assert sorted(path.name for path in tmp_path.iterdir()) == present
    assert_nothing_held(group)
    assert checkpoint.save(tmp_path, saved.state, step=3, keep=1).step == 3
    assert [each.step for each in checkpoint.list_snapshots(tmp_path)] == [3]
    assert len(list(tmp_path.iterdir())) == 1


def test_training_goes_on_while_a_snapshot_is_written(group: Cluster, tmp_path: Path) -> None:
    training = Training("worker0", "worker1", "driver")
    training.train(2)
    expected = training.parameters()
    rpc.rpc_sync("worker0", write_when_let, args=("writing",))
    pending = checkpoint.save_async(tmp_path, training.state, step=2)
    losses = training.train(3)
    assert not pending.done()
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(CallTimeout, match="earlier snapshot is still being written"):
        checkpoint.save(tmp_path, training.state, step=5, timeout=0.05)
    rpc.rpc_sync("worker0", open_gate, args=("writing",))
    assert pending.wait() == checkpoint.latest(tmp_path)
    checkpoint.restore(tmp_path, training.state)
    assert equal(training.parameters(), expected)
    assert training.train(3) == losses


def test_a_save_whose_thread_cannot_start_leaves_nothing(
    group: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"data": rpc.remote("worker0", list)}

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(owners, "in_background", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            checkpoint.save_async(tmp_path, state, step=1)
    assert_nothing_held(group)
    assert checkpoint.save(tmp_path, state, step=2, timeout=20).step == 2


def test_no_step_of_concurrent_trainers_is_half_in_a_snapshot(
    group: Cluster, tmp_path: Path
) -> None:
    pair = Pair(checkpoint.StepGate())
    arguments = (pair.gate, pair.first, pair.second, 60)
    trainers = [rpc.rpc_async(name, step_often, args=arguments) for name in group.names]
    counts = []
    while not all(trainer.done() for trainer in trainers):
        state = pair.state()
        checkpoint.save(tmp_path, state, step=len(counts), gate=pair.gate, random_states=False)
        counts.append(saved_numbers(tmp_path))
    for trainer in trainers:
        trainer.wait()
    assert all(first == second for first, second in counts), counts
    assert len({first for first, _ in counts}) > 1, counts


def test_a_snapshot_waits_for_a_step_under_way_and_steps_for_the_snapshot(
    group: Cluster, tmp_path: Path
) -> None:
    pair = Pair(checkpoint.StepGate())
    things = (pair.gate, pair.first, pair.second)
    half = rpc.rpc_async("worker0", step_half, args=(*things, "half"))
    wait_until(lambda: float(pair.first.to_here()) == 1, lambda: "the step did not begin")
    with pytest.raises(CallTimeout, match=r"steps are under way on 'worker0'"):
        checkpoint.save(tmp_path, pair.state(), step=0, gate=pair.gate, timeout=0.2)
    assert checkpoint.latest(tmp_path) is None
    # A save that gave up waiting does not keep the gate closed.
    rpc.rpc_sync("worker1", step_often, args=(*things, 1))
    rpc.rpc_sync("worker0", open_gate, args=("half",))
    half.wait()
    checkpoint.save(tmp_path, pair.state(), step=1, gate=pair.gate, random_states=False)
    assert saved_numbers(tmp_path) == (2, 2)
    with pair.gate.closed():
        error = raised_by(pair.gate.step(timeout=0.1).__enter__)
    assert isinstance(error, CallTimeout)
    assert "the gate is closed" in str(error)
    rpc.rpc_sync("worker1", step_often, args=(*things, 1))


def test_a_dropped_gate_is_told_of_no_lost_worker(group: Cluster) -> None:
    watchers = current()._watchers
    before = len(watchers)
    gate = checkpoint.StepGate()
    assert len(watchers) == before + 1
    del gate
    wait_until(lambda: len(watchers) == before, lambda: "it is told for ever")
