"""The store of an open group in a file, also where a process group meets in the same file."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from torchweft.engine.worker.rendezvous import GroupFile
from torchweft.errors import RendezvousError

LIMIT_S = 5.0


def test_the_file_has_the_keys_that_are_there(tmp_path: Path) -> None:
    store = GroupFile(str(tmp_path / "group"), LIMIT_S)
    for number in range(50):
        store.set(f"weft/0/{number}", "x" * 100)
        assert store.deleteKey(f"weft/0/{number}")
    store.set("weft/0/last", b"value")
    assert GroupFile(str(tmp_path / "group"), LIMIT_S).get("weft/0/last") == b"value"
    assert os.path.getsize(tmp_path / "group") < 100


def test_a_process_group_may_meet_in_the_same_file(tmp_path: Path) -> None:
    path = str(tmp_path / "both")
    ours = GroupFile(path, LIMIT_S)
    ours.set("weft/0/ids", "first")
    theirs = FileStore(path, -1)
    theirs.set_timeout(timedelta(seconds=LIMIT_S))
    for number in range(30):
        theirs.set(f"theirs/{number}", str(number))
        ours.set("weft/0/ids", "x" * number)
        ours.set(f"weft/0/member/{number}", str(number))
        if number % 2:
            assert ours.deleteKey(f"weft/0/member/{number - 1}")
        assert theirs.get(f"weft/0/member/{number}") == str(number).encode()
        assert theirs.get("weft/0/ids") == b"x" * number
        assert ours.get(f"theirs/{number}") == str(number).encode()
        assert ours.add("weft/0/count", 2) == 2 * number + 2
    assert theirs.check(["weft/0/member/1"])
    assert not theirs.check(["weft/0/member/0"])
    assert ours.compare_set("weft/0/ids", "x" * 29, "y") == b"y"
    assert theirs.get("weft/0/ids") == b"y"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no store\n")
    with pytest.raises(RendezvousError, match="no rendezvous store"):
        GroupFile(str(tmp_path / "text"), LIMIT_S).set("weft/0/ids", "1")
