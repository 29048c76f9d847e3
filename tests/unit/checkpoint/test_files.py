from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.tables import cases
from tests.unit.checkpoint.encoded import encoded
from torchweft.checkpoint import files
from torchweft.checkpoint.files import HEAD, Written

Content = dict[str, dict[str, Any]]


def item(state: Any, kind: str = "value") -> dict[str, Any]:
    return {"kind": kind, "state": state}


def written(path: Path, state: Any) -> Any:
    """Returns a value that went through a file."""
    files.write_part(str(path), encoded({"x": item(state)}))
    return files.read_part(str(path), ["x"])["x"]["state"]


def test_a_part_comes_back_and_is_known_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "part"
    content = {"a": item(torch.arange(1000.0), "tensor"), "b": item((1, None)), "c": item(3)}
    identity = files.write_part(str(path), encoded(content))
    data = path.read_bytes()
    assert identity == (len(data), hashlib.sha256(data).hexdigest())
    assert files.difference(str(path), identity) == ""
    part = files.read_part(str(path), ["a", "b"])
    assert list(part) == ["a", "b"]
    assert torch.equal(part["a"]["state"], torch.arange(1000.0))
    assert part["b"] == {"kind": "value", "state": (1, None)}
    assert [each.name for each in tmp_path.iterdir()] == ["part"]


def test_any_tool_reads_the_tensors_by_name_and_a_person_the_rest(tmp_path: Path) -> None:
    path = str(tmp_path / "part")
    content: Content = {
        "model/0": item({"state": {"0.weight": torch.ones(2)}, "metadata": {"": {}}}, "module"),
        "optimizer/state/model/0:0.weight": item(
            {"state": {"exp_avg": torch.zeros(2)}, "shared": {}, "shape": [2], "group": 0},
            "parameter's state",
        ),
        "history": item({"losses": [torch.ones(()), 2.5], "name": "first"}),
        "/random/ps": item({"torch": torch.zeros(3, dtype=torch.uint8)}, "random state"),
    }
    files.write_part(path, encoded(content))
    assert load_file(path).keys() == {
        "model/0:0.weight",
        "optimizer/state/model/0:0.weight/exp_avg",
        "history/losses/0",
        "random/ps/torch",
    }
    with safe_open(path, framework="pt") as file:
        head = json.loads(file.metadata()[HEAD])
    assert head["history"]["state"] == {
        "losses": [{"$tensor": "history/losses/0"}, 2.5],
        "name": "first",
    }


@cases(
    "state",
    [
        {"$class": []},
        {"$tensor": "none"},
        {"$dtype": "nn"},
        {"$device": "nowhere"},
        {"$tensor": "t", "dtype": "load"},
        {"$tensor": "t", "stride": [-1]},
        {"$sparse": [{"$tensor": "i"}, {"$tensor": "t"}, [2]]},
        {"$bytes": 3},
    ],
)
def test_heads_that_were_not_written_here_are_refused(state: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "part")
    tensors = {"t": torch.ones(2), "i": torch.tensor([[0, 99]])}
    save_file(tensors, path, {HEAD: json.dumps({"x": item(state)})})
    with pytest.raises(ValueError, match="no part of a snapshot"):
        files.read_part(path, ["x"])


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part"
    for data in (b"", b"nothing", b"\xff" * 100):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="no part of a snapshot"):
            files.read_part(str(path), [])
    save_file({}, path)
    with pytest.raises(ValueError, match="no part of a snapshot"):
        files.read_part(str(path), [])
    with pytest.raises(FileNotFoundError):
        files.read_part(str(tmp_path / "none"), [])


def test_links_are_not_followed_and_pipes_not_waited_for(tmp_path: Path) -> None:
    target, path, pipe = tmp_path / "precious", tmp_path / "part", tmp_path / "pipe"
    target.write_text("precious")
    path.symlink_to(target)
    assert written(path, 1) == 1
    assert target.read_text() == "precious"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="Is no plain file"):
        files.difference(str(pipe), Written(3, ""))


def test_a_file_has_its_name_only_when_the_disk_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "part")
    order: list[str] = []
    real_flush, real_rename = files.flush, files.rename

    def flush(name: str) -> None:
        real_flush(name)
        order.append(name if os.path.isdir(name) else Path(name).read_text())

    def rename(unfinished: str, final: str) -> None:
        assert os.listdir(tmp_path) == [os.path.basename(unfinished)]
        order.append("rename")
        real_rename(unfinished, final)

    monkeypatch.setattr(files, "flush", flush)
    monkeypatch.setattr(files, "rename", rename)
    files.write_bytes(path, b"content")
    assert order == ["content", "rename", str(tmp_path)]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_former_file_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"former")

    def write(unfinished: str) -> None:
        Path(unfinished).write_bytes(b"some")
        raise error

    with pytest.raises(type(error)):
        files.write_whole(str(path), write)
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["part"]


def test_a_file_may_be_read_by_whom_the_mask_of_the_process_lets(tmp_path: Path) -> None:
    path = tmp_path / "part"
    before = os.umask(0o027)
    try:
        written(path, torch.ones(1))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
