from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchweft.checkpoint import snapshots

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
