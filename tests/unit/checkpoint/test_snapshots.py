from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchweft.checkpoint import snapshots
from torchweft.checkpoint.snapshots import (
    BadManifest,
    EntryRecord,
    Manifest,
    PartRecord,
    read_manifest,
)
from torchweft.errors import (
    ArgumentTypeError,
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


# Errors

FILE = "1-ps.pt"


def manifest() -> Manifest:
    part = PartRecord("ps", 1, FILE, 1, "", True)
    return Manifest(9, "", "driver", ["driver", "ps"], [part], {}, {})
