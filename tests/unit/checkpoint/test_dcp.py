"""Folders of ``torch.distributed.checkpoint``, written and read without a group."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn

from tests.unit.checkpoint.encoded import encoded, saved
from torchweft.checkpoint import dcp, files, kinds, snapshots
from torchweft.checkpoint.kinds import FOREIGN
from torchweft.checkpoint.snapshots import EntryRecord, Manifest, PartRecord, Snapshot
from torchweft.errors import CheckpointError

# PyTorch says that no process group is there.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def make_part(worker: str) -> dict[str, Any]:
    return {
        f"{worker}/layer": {
            "kind": "module",
            "state": saved("module", nn.Linear(2, 1)),
        },
        f"/random/{worker}": {"kind": "random state", "state": kinds.take_random()},
        f"{worker}/values": {
            "kind": "value",
            "state": {"a": (1, torch.ones(3)), 2: torch.ones(2, dtype=torch.complex128)},
        },
    }


def shown(content: dict[str, Any]) -> str:
    """Returns a text that is equal for equal parts."""
    return repr(
        [
            (path, item["kind"], sorted(map(repr, item["state"].items())))
            for path, item in content.items()
        ]
    )


CONTENT = {worker: make_part(worker) for worker in ("a", "b")}


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """A snapshot of two workers."""
    made = Snapshot(str(tmp_path), "000001-step3-0123abcd", 3)
    os.mkdir(made.path)
    parts = []
    for rank, (worker, content) in enumerate(CONTENT.items()):
        name = f"{rank}-{worker}.pt"
        written = files.write_part(
            snapshots.part_path(str(tmp_path), made.name, name), encoded(content)
        )
        parts.append(PartRecord(worker, rank, name, *written, True))
    items = {
        path: EntryRecord(item["kind"], worker)
        for worker, content in CONTENT.items()
        for path, item in content.items()
    }
    manifest = Manifest(3, "", "a", ["a", "b"], parts, items, {"weft": "0"})
    files.write_bytes(os.path.join(made.path, snapshots.MANIFEST), manifest.to_bytes())
    return made


def test_all_of_a_snapshot_comes_back(snapshot: Snapshot, tmp_path: Path) -> None:
    folder = str(tmp_path / "folder")
    dcp.to_dcp(snapshot, folder)
    manifest = dcp.read_manifest(folder, [])
    assert (manifest.step, manifest.workers) == (3, ["a", "b"])
    for worker, content in CONTENT.items():
        part = manifest.part_of(worker)
        assert part.file == dcp.METADATA
        found = dcp.read_part(folder, part.sha256, list(content))
        assert shown(found) == shown(content)


def test_a_folder_of_another_program_has_what_its_names_say(tmp_path: Path) -> None:
    folder, module = str(tmp_path / "folder"), nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    saved = {"model": module.state_dict(), "step": 7, "weights": torch.ones(3)}
    stock.save(saved, checkpoint_id=folder)
    assert dcp.is_folder(folder)
    paths = ["model/0", "model/1", "weights", "step", "optimizer"]
    manifest = dcp.read_manifest(folder, paths)
    assert set(manifest.items) == set(paths) - {"optimizer"}
    found = dcp.read_part(folder, "", ["model/1", "weights", "step"])
    assert {each["kind"] for each in found.values()} == {FOREIGN}
    assert found["model/1"]["state"].keys() == {"weight", "bias"}
    assert torch.equal(found["model/1"]["state"]["bias"], module[1].bias)
    assert torch.equal(found["weights"]["state"][""], torch.ones(3))
    assert found["step"]["state"] == {"": 7}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/nowhere/at/all",)


def test_nothing_in_a_folder_runs_code(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    stock.save({"evil": Evil(), "good": 1}, checkpoint_id=folder)
    assert dcp.read_part(str(folder), "", ["good"])["good"]["state"] == {"": 1}
    with pytest.raises(ValueError, match="mkdir"):
        dcp.read_part(str(folder), "", ["evil"])
    for index, text in [
        (Evil(), "posix.mkdir, which no index has"),
        (torch.load, "torch.serialization.load, which no index has"),
        ({}, "no index of a checkpoint"),
    ]:
        (folder / dcp.METADATA).write_bytes(pickle.dumps(index))
        with pytest.raises(ValueError, match=text):
            dcp.read_part(str(folder), "", ["good"])
    (folder / dcp.METADATA).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"reading the folder .* failed"):
        dcp.read_manifest(str(folder), ["good"])
