from __future__ import annotations

import hashlib
import io
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweft.checkpoint import files
from torchweft.checkpoint.files import HashingFile, Written


def test_a_part_comes_back_and_is_known_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "part"
    written = files.write_part(str(path), {"a": torch.arange(1000.0), "b": (1, None)})
    data = path.read_bytes()
    assert written == (len(data), hashlib.sha256(data).hexdigest())
    assert files.difference(str(path), written) == ""
    part = files.read_part(str(path))
    assert torch.equal(part["a"], torch.arange(1000.0))
    assert part["b"] == (1, None)
    assert [each.name for each in tmp_path.iterdir()] == ["part"]


def test_what_differs_is_said(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"abc")
    written = Written(3, hashlib.sha256(b"abc").hexdigest())
    assert files.difference(str(path), written) == ""
    path.write_bytes(b"abd")
    assert "SHA-256" in files.difference(str(path), written)
    path.write_bytes(b"abcd")
    assert files.difference(str(path), written) == "it has 4 bytes, 3 were written"
    with pytest.raises(FileNotFoundError):
        files.difference(str(tmp_path / "none"), written)


def test_links_are_not_followed_and_pipes_not_waited_for(tmp_path: Path) -> None:
    target, path, pipe = tmp_path / "precious", tmp_path / "part", tmp_path / "pipe"
    target.write_text("precious")
    path.symlink_to(target)
    Path(str(path) + files.UNFINISHED).symlink_to(target)
    files.write_part(str(path), {"a": 1})
    assert target.read_text() == "precious"
    assert files.read_part(str(path)) == {"a": 1}
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="Is no plain file"):
        files.difference(str(pipe), Written(3, ""))


def test_a_file_has_its_name_only_when_the_disk_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "part")
    order: list[str] = []
    real_flush, real_rename = files.flush, files.rename

    def flush(file: Any) -> None:
        real_flush(file)
        assert os.listdir(tmp_path) == ["part.tmp"]
        order.append(Path(path + files.UNFINISHED).read_text())

    def rename(unfinished: str, final: str) -> None:
        order.append("rename")
        real_rename(unfinished, final)

    monkeypatch.setattr(files, "flush", flush)
    monkeypatch.setattr(files, "rename", rename)
    monkeypatch.setattr(files, "flush_directory", order.append)
    files.write_whole(path, lambda file: file.write(b"content"))
    assert order == ["content", "rename", str(tmp_path)]


def test_a_write_that_fails_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"former")

    def write(file: HashingFile) -> None:
        file.write(b"some")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        files.write_whole(str(path), write)
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["part"]


class FullFile:
    """Accepts ten bytes."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        if len(self.data) + len(data) > 10:
            raise OSError(28, "No space left on device")
        self.data += data


def test_a_full_disk_is_told_when_all_has_been_given_to_it() -> None:
    full = FullFile()
    file = HashingFile(full)  # type: ignore[arg-type]
    assert [file.write(b"12345") for _ in range(4)] == [5, 5, 5, 5]
    assert full.data == b"1234512345"
    with pytest.raises(OSError, match="No space left") as caught:
        file.check()
    frames = [entry.name for entry in caught.traceback]
    assert frames[-1] == "check"
    torch.save({"a": torch.ones(100)}, HashingFile(FullFile()))  # type: ignore[arg-type]


def test_an_interrupt_is_no_error_of_the_serializer(tmp_path: Path) -> None:
    class Interrupted(io.BytesIO):
        writes = 0

        def write(self, data: Any) -> int:
            self.writes += 1
            if self.writes == 2:
                raise KeyboardInterrupt
            return super().write(data)

    def write(file: HashingFile) -> None:
        interrupted = HashingFile(Interrupted())
        torch.save({"a": torch.ones(100)}, interrupted)  # type: ignore[arg-type]
        interrupted.check()

    with pytest.raises(KeyboardInterrupt):
        files.write_whole(str(tmp_path / "part"), write)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("interrupted", [1, 2, 5, 9])
def test_an_interrupt_as_a_write_is_entered_is_raised_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    real, writes = HashingFile.write, itertools.count(1)

    def write(self: HashingFile, data: Any) -> int:
        if next(writes) == interrupted:
            raise KeyboardInterrupt  # before the file can note it
        return real(self, data)

    monkeypatch.setattr(HashingFile, "write", write)
    with pytest.raises(KeyboardInterrupt):
        files.write_part(str(tmp_path / "part"), {"a": torch.ones(100)})
    assert next(writes) > interrupted
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_not_there_is_removed() -> None:
    files.remove_file("/nowhere/at/all")
