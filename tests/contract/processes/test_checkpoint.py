"""Snapshots of values on several workers: their contents, restoring, and failures."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.processes.checkpoint_model import (
    Counter,
    Training,
    equal,
    last_file,
    limit_files,
    linear,
)
from torchweft import checkpoint, rpc
from torchweft.errors import (
    CheckpointError,
    SnapshotCorrupt,
    SnapshotNotFound,
    StateMismatch,
)
from torchweft.launch import Cluster

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.keeps("threads", "descriptors", "shared memory", "processes"),
]


def test_a_parameter_without_a_name_goes_by_its_number(group: Cluster, tmp_path: Path) -> None:
    training = Training("worker0", "worker1", "driver")
    training.train(2)
    nameless = {"optimizer": training.optimizer}
    checkpoint.save(tmp_path, nameless, step=2, random_states=False)
    expected = training.optimizer.state_dict()["state"]
    training.train(2)
    checkpoint.restore(tmp_path, nameless)
    found = training.optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, state in expected.items():
        assert all(torch.equal(state[key], found[number][key]) for key in state)


# What can be saved


def test_things_behind_references_keep_who_they_are_and_get_their_content_back(
    group: Cluster, tmp_path: Path
) -> None:
    tensor = rpc.remote("worker0", torch.arange, args=(4.0,))
    numbers = rpc.remote("worker1", dict, args=([("x", 1)],))
    counter = rpc.remote("worker1", Counter)
    generator = rpc.remote("worker0", torch.Generator)
    module = rpc.remote("worker0", linear, args=(0, 2, 3))
    own = rpc.RRef([1, 2])
    state = {
        "remote": {"tensor": tensor, "numbers": numbers, "counter": counter, "module": module},
        "random": [generator, torch.Generator().manual_seed(5)],
        "own": own,
        "here": nn.Linear(2, 2),
        "weights": torch.ones(3),
        "plain": {"text": "t", "tuple": (1, 2.5, None), "bytes": b"b", "list": []},
    }
    weight = state["here"].weight.detach().clone()  # type: ignore[union-attr]
    saved = checkpoint.save(tmp_path, state, step=7)
    drawn = rpc.rpc_sync("worker0", draw, args=(generator,)), draw(state["random"][1])  # type: ignore[index]
    before = module.to_here().weight
    # Change all of it.
    counter.rpc_sync().count()
    for changed, function in ((tensor, zero), (numbers, clear), (module, blank), (own, clear)):
        rpc.rpc_sync(changed.owner(), function, args=(changed,))
    here, weights, plain = state["here"], state["weights"], state["plain"]
    blank(here)  # type: ignore[arg-type]
    weights.zero_()  # type: ignore[union-attr]
    plain["text"] = "other"  # type: ignore[index, call-overload]
    assert checkpoint.restore(tmp_path, state) == saved
    assert tensor.to_here().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert numbers.to_here() == {"x": 1}
    assert counter.rpc_sync().state_dict() == {"calls": 0}
    assert torch.equal(module.to_here().weight, before)
    assert own.local_value() == [1, 2]
    assert state["here"] is here
    assert torch.equal(here.weight, weight)  # type: ignore[union-attr]
    assert state["weights"] is weights
    assert weights.tolist() == [1.0, 1.0, 1.0]  # type: ignore[union-attr]
    assert state["plain"] is plain
    assert plain == {"text": "t", "tuple": (1, 2.5, None), "bytes": b"b", "list": []}
    again = rpc.rpc_sync("worker0", draw, args=(generator,)), draw(state["random"][1])  # type: ignore[index]
    assert again == drawn


def draw(generator: Any) -> float:
    if isinstance(generator, rpc.RRef):
        generator = generator.local_value()
    return float(torch.rand((), generator=generator))


def zero(tensor: rpc.RRef[Tensor]) -> None:
    tensor.local_value().zero_()


def clear(numbers: rpc.RRef[Any]) -> None:
    numbers.local_value().clear()


def blank(module: Any) -> None:
    module = module.local_value() if isinstance(module, rpc.RRef) else module
    with torch.no_grad():
        module.weight.zero_()


def test_values_that_have_grown_tensors_are_restored_into_the_values_at_first(
    group: Cluster, tmp_path: Path
) -> None:
    def first() -> dict[str, Any]:
        history = {"by layer": {}, "steps": [], "by name": defaultdict(list)}
        return {"losses": [], "best": None, "lowest": 1e9, "history": history}

    state, other = first(), first()
    state["history"]["by name"]["loss"].append(1.0)
    state["losses"] += [torch.tensor(1.0), torch.tensor(2.0)]
    state["best"] = {"0": torch.ones(2), "all": [[torch.ones(1)], (torch.ones(3), 5)], "step": 3}
    state["lowest"] = torch.tensor(0.5)
    state["history"]["by layer"] |= {"1": torch.zeros(2), "0": None}
    state["history"]["steps"].append(7)
    checkpoint.save(tmp_path, state, step=1)
    losses = other["losses"]
    checkpoint.restore(tmp_path, other)
    assert other["losses"] is losses
    assert repr(other) == repr(state)
    assert other["history"]["by name"]["another"] == []
    with pytest.raises(StateMismatch, match="only the snapshot has losses/0, losses/1"):
        checkpoint.restore(tmp_path, {**first(), "losses": torch.zeros(2)})


# Damaged snapshots and other states


@pytest.fixture
def saved(group: Cluster, tmp_path: Path) -> Iterator[Training]:
    """Two snapshots, of steps 1 and 2; nothing has been trained since."""
    training = Training("worker0", "worker1", "driver")
    for step in (1, 2):
        training.train(1)
        checkpoint.save(tmp_path, training.state, step=step)
    yield training
    vars(training).clear()  # pytest holds the fixture for longer, and it has references.


def test_a_loop_falls_back_over_a_damaged_snapshot_if_it_may(
    saved: Training, tmp_path: Path
) -> None:
    path = last_file(tmp_path, "2-worker1.pt")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotCorrupt):
        checkpoint.resumable(3, tmp_path, saved.state, every=1)
    steps = checkpoint.resumable(3, tmp_path, saved.state, every=1, fall_back=True)
    assert steps.first_step == saved.state["done"] == 1


def test_a_missing_file_is_named_with_who_wrote_it(saved: Training, tmp_path: Path) -> None:
    last_file(tmp_path, "2-worker1.pt").unlink()
    with pytest.raises(SnapshotNotFound, match=r"2-worker1\.pt.*'worker1'") as caught:
        checkpoint.restore(tmp_path, saved.state)
    assert caught.value.step == 2
    with pytest.raises(SnapshotNotFound, match=r"of step 9 .*steps 1, 2"):
        checkpoint.restore(tmp_path, saved.state, step=9)
    with pytest.raises(FileNotFoundError, match="no snapshot in"):
        checkpoint.restore(tmp_path / "elsewhere", saved.state)


# Failures while saving


def test_a_directory_that_cannot_be_made_is_named(group: Cluster) -> None:
    with pytest.raises(
        CheckpointError, match=r"step 3 failed on worker '.*', in /proc/x"
    ) as caught:
        checkpoint.save("/proc/x", {"model": linear(0, 2, 3)}, step=3)
    error = caught.value
    assert (error.directory, error.step, error.worker) == ("/proc/x", 3, group.name)
    assert isinstance(error.__cause__, OSError)


def test_what_goes_wrong_in_the_background_is_raised_by_the_future(
    group: Cluster, tmp_path: Path
) -> None:
    state = {"big": rpc.remote("worker0", torch.zeros, args=(1000,))}
    former = rpc.rpc_sync("worker0", limit_files, args=(2000,))
    try:
        pending = checkpoint.save_async(tmp_path, state, step=1)
        with pytest.raises(CheckpointError, match="worker0"):
            pending.wait()
    finally:
        rpc.rpc_sync("worker0", limit_files, args=(former,))
    assert list(tmp_path.iterdir()) == []


# Disks of their own


@pytest.fixture
def own_disks(group: Cluster, tmp_path: Path) -> Iterator[Path]:
    """Gives each worker a working directory of its own; returns their parent."""
    before = {name: rpc.rpc_sync(name, os.getcwd) for name in [group.name, *group.names]}
    for name in before:
        (tmp_path / name).mkdir()
        rpc.rpc_sync(name, os.chdir, args=(str(tmp_path / name),))
    yield tmp_path
    for name, path in before.items():
        rpc.rpc_sync(name, os.chdir, args=(path,))


def test_every_worker_may_have_a_disk_of_its_own(group: Cluster, own_disks: Path) -> None:
    directory = "/proc/self/cwd/snapshots"
    training = Training("worker0", "worker1", "driver")
    for step in (1, 2):
        training.train(1)
        checkpoint.save(directory, training.state, step=step, keep=1)
    files_of = {
        name: sorted(path.name for path in (own_disks / name).rglob("*.*"))
        for name in ("driver", "worker0", "worker1")
    }
    # The first snapshot is gone from all of them.
    assert files_of == {
        "driver": ["0-driver.pt", "manifest.json"],
        "worker0": ["1-worker0.pt"],
        "worker1": ["2-worker1.pt"],
    }
    manifest = json.loads(last_file(Path(directory), "manifest.json").read_text())
    seen = {part["worker"]: part["is_seen"] for part in manifest["snapshot"]["parts"]}
    assert seen == {"driver": True, "worker0": False, "worker1": False}
    expected = training.parameters()
    # If a part has a new owner, the worker that wrote the part reads it.
    moved = Training("worker1", "driver", "worker0")
    checkpoint.restore(directory, moved.state)
    assert equal(moved.parameters(), expected)
    assert moved.train(2) == training.train(2)
