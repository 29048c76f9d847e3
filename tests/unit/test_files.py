"""Files in folders where others may write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torchweft.files import read_plain, replacing


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    target, path = tmp_path / "precious", tmp_path / "report"
    target.write_text("precious")
    path.symlink_to(target)
    with replacing(path) as file:
        file.write(b"a report")
    assert not path.is_symlink()
    assert (path.read_bytes(), target.read_text()) == (b"a report", "precious")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["precious", "report"]


def test_a_name_cannot_be_foreseen(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with replacing(tmp_path / "report", "w") as file:
            file.write("text")
            names.update(each.name for each in tmp_path.glob("*.new"))
    assert len(names) == 3


def test_a_file_has_the_permissions_of_a_new_one(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "report") as file:
            file.write(b"a report")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "report").stat().st_mode) == 0o640


def test_an_error_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text("former")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_text() == "former"
    assert [each.name for each in tmp_path.iterdir()] == ["report"]


def test_only_plain_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    def read(name: str) -> str:
        try:
            return read_plain(os.path.join(tmp_path, name), 5).decode()
        except OSError as error:
            return str(error.strerror)

    assert read("file") == read("link") == "12345"
    assert read("pipe") == read("/dev/zero") == "Is no plain file"
    assert read("folder") == "Is a directory"
    assert read("none") == "No such file or directory"
    with pytest.raises(OSError, match="Has more than 4 bytes"):
        read_plain(tmp_path / "file", 4)
