"""Files in folders where others may write."""

from __future__ import annotations

import os
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
