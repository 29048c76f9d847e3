from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchweft.checkpoint import snapshots
from torchweft.checkpoint.kinds import Differences
from torchweft.checkpoint.snapshots import (
    BadManifest,
    EntryRecord,
    Manifest,
    PartRecord,
    Snapshot,
    read_manifest,
)
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
    wrong: Any = 3
    with pytest.raises(ArgumentTypeError, match="directory is an int; pass the path"):
        snapshots.latest(wrong)
    (tmp_path / snapshots.MANIFEST).write_text("{}")
    with pytest.raises(SnapshotNotFound, match=f"itself a snapshot; pass {tmp_path.parent}, and"):
        snapshots.find(tmp_path, None)


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


# Manifests

MANIFEST = Manifest(
    step=3,
    written="2030-01-01T00:00:00+00:00",
    driver="driver",
    workers=["driver", "ps"],
    parts=[
        PartRecord("driver", 0, "0-driver.pt", 10, "ab", True),
        PartRecord("ps", 1, "1-ps.pt", 20, "cd", False),
    ],
    items={"model": EntryRecord("module", "ps")},
    versions={"weft": "0"},
)


def test_it_comes_back() -> None:
    assert read_manifest(MANIFEST.to_bytes()) == MANIFEST
    part = MANIFEST.part_of("ps")
    assert (part.size_bytes, part.sha256) == (20, "cd")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (MANIFEST.to_bytes().replace(b'"step": 3', b'"step": 4'), "SHA-256"),
        (MANIFEST.to_bytes()[:-5], "no manifest"),
        (b"", "no manifest"),
        (b"[]", "no manifest"),
        (b"\xff\xfe", "no manifest"),
        (b'{"format": 2, "snapshot": {}}', "no manifest"),
        (MANIFEST.to_bytes().replace(b'"format": 2', b'"format": 1'), "version 1"),
    ],
    ids=["changed", "cut", "empty", "list", "bytes", "no hash", "version"],
)
def test_another_one_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(BadManifest, match=problem):
        read_manifest(data)


def test_a_person_can_read_it() -> None:
    content = json.loads(MANIFEST.to_bytes())["snapshot"]
    assert content["items"] == {"model": {"kind": "module", "worker": "ps"}}
    assert content["parts"][1]["file"] == "1-ps.pt"


def test_deep_nesting_and_endless_numbers_are_no_manifest() -> None:
    for data in (b"[" * 1_000_000, b"9" * 100_000, b'{"format": 2e999, "snapshot": {}}'):
        with pytest.raises(BadManifest):
            read_manifest(data)


# Removal

NAMES = [f"00000{number}-step{number}-0123abcd" for number in range(1, 5)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Four snapshots, the third without a manifest, and another folder."""
    for number, name in enumerate(NAMES):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0-a.pt").touch()
        if number != 2:
            (tmp_path / name / snapshots.MANIFEST).touch()
    (tmp_path / "notes").mkdir()
    return tmp_path


def present(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_did_not_end_is_removed(directory: Path) -> None:
    snapshots.remove_unfinished(str(directory))
    assert present(directory) == [NAMES[0], NAMES[1], NAMES[3], "notes"]


def test_the_newest_are_kept(directory: Path) -> None:
    assert snapshots.names_to_keep(str(directory), 2) == [NAMES[1], NAMES[3]]
    assert snapshots.names_to_keep(str(directory), None) == [NAMES[0], NAMES[1], NAMES[3]]
    snapshots.keep_only(str(directory), snapshots.names_to_keep(str(directory), 1))
    assert present(directory) == [NAMES[3], "notes"]


def test_the_manifest_goes_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> None:
        assert not (directory / NAMES[0] / snapshots.MANIFEST).exists()
        raise PermissionError("not yours")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    snapshots.remove(str(directory / NAMES[0]))
    assert snapshots.list_snapshots(directory)[0].name == NAMES[1]


def test_what_cannot_be_removed_is_a_warning(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with caplog.at_level(logging.WARNING, logger="torchweft"):
        snapshots.keep_only(str(directory), NAMES[1:])
    assert "could not be removed: not yours" in caplog.text


def test_what_is_gone_need_not_be_removed(directory: Path) -> None:
    snapshots.remove(str(directory / "none"))
    snapshots.remove_if_empty(str(directory / "none"))
    snapshots.remove_if_empty(str(directory / NAMES[0]))
    (directory / "notes").rmdir()
    (directory / "empty").mkdir()
    snapshots.remove_if_empty(str(directory / "empty"))
    assert present(directory) == NAMES


# Errors

SNAPSHOT = Snapshot("/d", "000003-step9-0123abcd", 9)
FILE = "1-ps.pt"


def manifest() -> Manifest:
    part = PartRecord("ps", 1, FILE, 1, "", True)
    return Manifest(9, "", "driver", ["driver", "ps"], [part], {}, {})


def test_who_lacks_what_and_who_wrote_it_is_said() -> None:
    error = snapshots.lacking(SNAPSHOT, manifest(), FILE, "trainer", ["driver", "trainer"])
    assert (error.worker, error.step, error.directory) == ("trainer", 9, "/d")
    assert "/d/000003-step9-0123abcd/1-ps.pt" in str(error)
    assert "'ps', which wrote it, is not in the group now" in str(error)
    here = snapshots.lacking(SNAPSHOT, manifest(), FILE, "trainer", ["ps"])
    assert "is not in the group" not in str(here)


def test_the_other_snapshots_are_named_the_last_one_first(tmp_path: Path) -> None:
    for number, step in enumerate((3, 6, 9), start=1):
        path = tmp_path / f"{number:06}-step{step}-0123abcd"
        path.mkdir()
        (path / snapshots.MANIFEST).touch()
    damaged = snapshots.latest(tmp_path)
    assert damaged is not None
    error = snapshots.corrupt(damaged, "/d/x", "ps", "a bit flipped")
    assert error.alternatives == (6, 3)
    assert "there are 6, 3" in str(error)
    assert "a bit flipped" in str(error)
    alone = snapshots.corrupt(SNAPSHOT, "/d/x", "ps", "a bit flipped")
    assert "no other snapshot" in str(alone)


def test_many_differences_are_cut_short_in_the_text_only() -> None:
    missing = [f"entry{number}" for number in range(20)]
    error = snapshots.mismatch("the snapshot", "/d", 9, Differences(missing, [], []))
    assert "entry7 and 12 more" in str(error)
    assert "strict=False" in str(error)
    assert error.missing == tuple(missing)
    assert "strict=False" not in str(
        snapshots.mismatch("the snapshot", "/d", 9, Differences([], [], ["a"]))
    )


def test_there_may_be_other_steps() -> None:
    assert "those of steps 9" in str(snapshots.not_found("/d", 4, [SNAPSHOT]))
    assert str(snapshots.not_found("/d", None, [])) == "there is no snapshot in /d"
