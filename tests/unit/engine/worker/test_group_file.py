"""The store of an open group in a file, also where a process group meets in the same file."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker.rendezvous import GroupFile, SignedStore, enter, join, open_store
from torchweft.errors import RendezvousError

LIMIT_S = 5.0


def test_a_process_group_may_meet_in_the_same_file(tmp_path: Path) -> None:
    path = str(tmp_path / "both")
    ours = GroupFile(path, LIMIT_S)
    ours.set("weft/0/ids", "first")
    theirs = FileStore(path, -1)
    theirs.set_timeout(timedelta(seconds=LIMIT_S))
    for number in range(30):
        theirs.set(f"theirs/{number}", str(number))
        ours.set("weft/0/ids", "x" * number)
        assert ours.get("weft/0/ids") == b"x" * number
        assert theirs.get(f"theirs/{number}") == str(number).encode()
        assert ours.add("weft/0/count", 2) == 2 * number + 2
    assert ours.compare_set("weft/0/ids", "x" * 29, "y") == b"y"
    assert not ours.check(["theirs/1"])


@pytest.mark.parametrize("prefix", ["weft/0", "rpc_prefix_0"])
def test_closed_and_open_groups_in_the_same_file_are_told_of_each_other(
    tmp_path: Path, prefix: str
) -> None:
    def join_closed(path: Path, prefix: str) -> None:
        store = SignedStore(PrefixStore(prefix, FileStore(str(path), -1)), None)
        join(store, Registration("a", 0, ("unix:@x",)), 1, LIMIT_S, deque())

    def join_open(path: Path, prefix: str) -> None:
        store = SignedStore(
            PrefixStore(prefix, open_store(f"file://{path}", 1, None, LIMIT_S)), None
        )
        enter(store, Registration("b", 1, ("unix:@x",)), LIMIT_S)

    join_closed(tmp_path / "closed", prefix)
    with pytest.raises(RendezvousError, match=r"mixes statically.*is closed"):
        join_open(tmp_path / "closed", prefix)
    join_open(tmp_path / "closed", "later")
    join_open(tmp_path / "open", prefix)
    with pytest.raises(RendezvousError, match=r"mixes statically.*is open"):
        join_closed(tmp_path / "open", prefix)
    join_open(tmp_path / "open", prefix)
    join_closed(tmp_path / "open", "later")


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.open").write_text("this is no store\n")
    with pytest.raises(RendezvousError, match="no rendezvous store"):
        GroupFile(str(tmp_path / "text"), LIMIT_S).set("weft/0/ids", "1")
    (tmp_path / "other").write_text("this is no store\n")
    with pytest.raises(RendezvousError, match="no rendezvous store"):
        GroupFile(str(tmp_path / "other"), LIMIT_S).compare_set("weft/0/kind", "", "open")
    assert (tmp_path / "other").read_text() == "this is no store\n"


def test_a_wait_ends_when_another_sets_the_key(tmp_path: Path) -> None:
    path = str(tmp_path / "group")
    setter = threading.Timer(0.05, lambda: GroupFile(path, LIMIT_S).set("late", "v"))
    setter.start()
    assert GroupFile(path, LIMIT_S).get("late") == b"v"
    setter.join()


def test_a_wait_in_vain_is_bounded(tmp_path: Path) -> None:
    store = GroupFile(str(tmp_path / "group"), LIMIT_S)
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"never did not come within 0\.1 s"):
        store.wait(["never"], timedelta(seconds=0.1))
    assert 0.1 <= time.monotonic() - start_s < 2.0


def test_a_process_forked_while_the_file_was_locked_does_not_keep_the_lock(tmp_path: Path) -> None:
    store = GroupFile(str(tmp_path / "group"), LIMIT_S)
    with store._locked() as file:
        inherited = os.dup(file)  # A fork shares the open file in the same way.
    other = os.open(store.path, os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
        os.close(inherited)
