from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchweft.checkpoint import files, kinds, reading, snapshots
from torchweft.checkpoint.parts import Owned
from torchweft.checkpoint.reading import CORRUPT, FOUND, LACKING, Found, Source
from torchweft.errors import CheckpointError, SnapshotCorrupt

NAME = "000001-step1-0123abcd"
FILE = "1-ps.pt"


def refuse(worker: str, source: Source) -> Found:
    raise AssertionError(f"{worker} was asked")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / NAME).mkdir()
    content = {
        "items": {
            "m": {"kind": "module", "state": kinds.take("m", "module", nn.Linear(2, 1))},
            "other": {"kind": "tensor", "state": torch.ones(1)},
        },
        "optimizers": {"o": {"state": {"m:weight": {"x": 1}, "m:bias": {}}, "shared": {"k": 2}}},
        "random": {"python": 3},
        "options": {"o": {0: {"lr": 1.0}}},
    }
    written = files.write_part(snapshots.part_path(str(tmp_path), NAME, FILE), content)
    return NAME, FILE, *written, (["m"], {"o": {"m:weight": 7}}, True), ["ps", "driver"]


def test_what_is_wanted_is_read_and_compared(tmp_path: Path, source: Source) -> None:
    owned = Owned({"m": nn.Linear(2, 1)}, {}, {})
    content, report = reading.read_and_compare(owned, str(tmp_path), [source], refuse)
    assert not any(report.values())
    assert list(content["items"]) == ["m"]
    assert content["optimizers"] == {"o": {7: {"x": 1}, "k": 2}}
    assert content["random"] == {"python": 3}
    assert content["options"] == {"o": {0: {"lr": 1.0}}}


def test_what_is_read_does_not_need_the_file_any_more(tmp_path: Path, source: Source) -> None:
    outcome, content = reading.read_entries(str(tmp_path), source)
    assert outcome == FOUND
    weight = content["items"]["m"]["state"]["state"]["weight"]
    before = weight.clone()
    with open(snapshots.part_path(str(tmp_path), NAME, FILE), "r+b") as file:
        file.write(b"\0" * os.path.getsize(file.name))
    assert torch.equal(weight, before)


def test_differences_are_reported(tmp_path: Path, source: Source) -> None:
    for value, problem in [
        (nn.Linear(2, 2), "m:weight has shape"),
        (torch.ones(1), "m is a module in the snapshot and a tensor here"),
    ]:
        owned = Owned({"m": value}, {}, {})
        _, report = reading.read_and_compare(owned, str(tmp_path), [source], refuse)
        assert problem in report["differing"][0]


def test_a_damaged_file_is_reported_without_asking_others(tmp_path: Path, source: Source) -> None:
    with open(snapshots.part_path(str(tmp_path), NAME, FILE), "ab") as file:
        file.write(b"more")
    _, report = reading.read_and_compare(Owned({}, {}, {}), str(tmp_path), [source], refuse)
    assert report["corrupt"][0][0] == FILE
    assert "bytes" in report["corrupt"][0][1]


def test_others_are_asked_in_turn_for_what_is_not_there(tmp_path: Path, source: Source) -> None:
    asked: list[str] = []

    def ask(worker: str, source: Source) -> Found:
        asked.append(worker)
        return (LACKING, None) if worker == "ps" else reading.read_entries(str(tmp_path), source)

    owned = Owned({"m": nn.Linear(2, 1)}, {}, {})
    content, report = reading.read_and_compare(owned, "/nowhere", [source], ask)
    assert asked == ["ps", "driver"]
    assert not any(report.values())
    assert list(content["items"]) == ["m"]

    def nobody(worker: str, source: Source) -> Found:
        return LACKING, None

    _, report = reading.read_and_compare(owned, "/nowhere", [source], nobody)
    assert report["lacking"] == [FILE]


def test_a_file_that_cannot_be_read_is_damaged(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, expected: Any) -> str:
        raise OSError("a bad block")

    monkeypatch.setattr(files, "difference", fail)
    assert reading.read_entries(str(tmp_path), source) == (
        CORRUPT,
        "it cannot be read: a bad block",
    )


def test_a_file_that_belongs_to_another_user_is_not_damaged(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, expected: Any) -> str:
        raise PermissionError("not yours")

    monkeypatch.setattr(files, "difference", fail)
    with pytest.raises(CheckpointError, match="may not read it") as caught:
        reading.read_entries(str(tmp_path), source)
    assert not isinstance(caught.value, SnapshotCorrupt)
