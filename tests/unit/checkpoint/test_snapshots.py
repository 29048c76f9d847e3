from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchweft.checkpoint import restoring, snapshots
from torchweft.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    SnapshotNotFound,
)


def make(directory: Path, name: str, *, is_whole: bool = True) -> None:
    (directory / name).mkdir()
    if is_whole:
        (directory / name / snapshots.MANIFEST).touch()


def test_a_directory_with_a_manifest_is_a_snapshot(tmp_path: Path) -> None:
    make(tmp_path, "000002-step20-0123abcd")
    make(tmp_path, "000001-step30-0123abcd")
    make(tmp_path, "000003-step40-0123abcd", is_whole=False)
    make(tmp_path, "other")
    (tmp_path / "file").touch()
    found = snapshots.list_snapshots(tmp_path)
    # In the order of writing: after a return to step 20, the newest snapshot is of step 20.
    assert [(each.name, each.step) for each in found] == [
        ("000001-step30-0123abcd", 30),
        ("000002-step20-0123abcd", 20),
    ]
    assert snapshots.latest(tmp_path) == found[1]
    assert found[1].path == str(tmp_path / "000002-step20-0123abcd")


def test_there_may_be_none(tmp_path: Path) -> None:
    assert snapshots.list_snapshots(tmp_path / "none") == []
    assert snapshots.latest(tmp_path) is None


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for look in (snapshots.latest, snapshots.list_snapshots):
        with pytest.raises(CheckpointError, match=r"looking.*/file: NotADirectory") as caught:
            look(tmp_path / "file")
        assert caught.value.directory == str(tmp_path / "file")


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "000001-step1-0123abcd")
    monkeypatch.chdir(tmp_path)
    found = snapshots.latest(".")
    assert found is not None
    assert found.directory == str(tmp_path)


def test_what_is_no_path_of_snapshots_is_named(tmp_path: Path) -> None:
    wrong: Any = snapshots.Snapshot("/d", "000001-step7-00000000", 7)
    with pytest.raises(ArgumentTypeError, match=r"pass snapshot\.directory, and .* step=7"):
        restoring.find(wrong, None)
    wrong = 3
    with pytest.raises(ArgumentTypeError, match="directory is an int; pass the path"):
        snapshots.latest(wrong)
    (tmp_path / snapshots.MANIFEST).write_text("{}")
    with pytest.raises(SnapshotNotFound, match=f"itself a snapshot; pass {tmp_path.parent}, and"):
        restoring.find(tmp_path, None)


def test_a_new_name_sorts_behind_all_even_unfinished_ones(tmp_path: Path) -> None:
    assert snapshots.new_name(str(tmp_path), 5).startswith("000001-step5-")
    make(tmp_path, "000009-step1-0123abcd")
    make(tmp_path, "1000000-step2-0123abcd", is_whole=False)
    first, second = (snapshots.new_name(str(tmp_path), 7) for _ in range(2))
    assert first.startswith("1000001-step7-")
    assert first != second
    make(tmp_path, first)
    assert snapshots.list_snapshots(tmp_path)[-1].name == first


def test_only_files_of_snapshots_have_a_path() -> None:
    path = snapshots.part_path("/d", "000001-step1-0123abcd", "12-ps:1_a.pt")
    assert path == "/d/000001-step1-0123abcd/12-ps:1_a.pt"
    for name, file in [
        ("..", "0-a.pt"),
        ("000001-step1-0123abcd/..", "0-a.pt"),
        ("000001-step1-0123abcd", "../0-a.pt"),
        ("000001-step1-0123abcd", "manifest.json"),
        ("000001-step1-0123abcd", "0-a/b.pt"),
    ]:
        with pytest.raises(ConfigurationError):
            snapshots.part_path("/d", name, file)
