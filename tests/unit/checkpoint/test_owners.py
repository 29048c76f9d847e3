"""Tests what owners do for a driver, and the deadline and errors of the driver's calls."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.checkpoint.encoded import encoded, saved
from torchweft import knobs
from torchweft.checkpoint import files, owners, snapshots
from torchweft.checkpoint.owners import CORRUPT, FOUND, LACKING, HeldPart, Origin
from torchweft.checkpoint.parts import OwnedState
from torchweft.checkpoint.saving import Deadline, raise_first
from torchweft.checkpoint.snapshots import EntryRecord, Manifest, PartRecord
from torchweft.engine.threads.device_streams import ServedStreams
from torchweft.engine.worker import current
from torchweft.engine.worker.agent import Slots
from torchweft.errors import (
    ArgumentTypeError,
    CallTimeout,
    CheckpointError,
    SnapshotCorrupt,
    WorkerLost,
)
from torchweft.optim.distributed import Failure


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {rank: SimpleNamespace(name=name) for rank, name in enumerate(("a", "b"))}
    agent = SimpleNamespace(
        me=SimpleNamespace(name="ps"),
        peers=peers,
        slots=Slots(),
        served_streams=ServedStreams(),
    )
    monkeypatch.setattr(current, "here", agent)


def test_a_deadline_is_of_all_calls_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    deadline = Deadline(5.0)
    assert deadline.left_s() == 5.0
    now[0] += 4.0
    assert deadline.left_s() == 1.0
    now[0] += 1.0
    with pytest.raises(CallTimeout, match=r"within its 5\.0 s"):
        deadline.left_s()
    assert Deadline(0.0).left_s() == 0.0
    with knobs.CHECKPOINT_TIMEOUT_S.override(7.0):
        assert Deadline(-1.0).left_s() == 7.0


def test_nothing_is_raised_where_nothing_failed() -> None:
    raise_first("saving", [], "/d", 1)


def test_all_that_failed_is_named() -> None:
    disk = OSError(28, "No space left on device")
    failures = [Failure(0, disk), Failure(1, KeyError("x"))]
    with pytest.raises(CheckpointError, match=r"saving failed on worker 'a'.*No space.*'b'") as e:
        raise_first("saving", failures, "/d", 3)
    assert e.value.__cause__ is disk
    assert (e.value.worker, e.value.step, e.value.directory) == ("a", 3, "/d")


def test_a_lost_worker_comes_before_all_else() -> None:
    errors = [OSError("disk"), ArgumentTypeError("x"), CallTimeout("late"), WorkerLost("gone")]
    failures = [Failure(0, error) for error in errors]
    for last in (4, 3, 2):
        with pytest.raises(type(errors[last - 1])) as caught:
            raise_first("saving", failures[:last], "/d", 3)
        assert caught.value is errors[last - 1]


def test_it_runs_on_a_thread_with_a_name() -> None:
    def name() -> tuple[str, bool]:
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert owners.in_background(name, "save", is_awaited=True).wait() == ("weft-ps-save", False)
    assert owners.in_background(name, "part", is_awaited=False).wait() == ("weft-ps-part", True)


class Thing:
    pass


def test_an_error_keeps_nothing_that_its_frames_had() -> None:
    things: list[weakref.ref[Thing]] = []

    def fail() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    future: torch.futures.Future[None] = owners.in_background(fail, "x", is_awaited=True)
    with pytest.raises(ValueError, match="outer"):
        future.wait()
    gc.collect()
    assert things[0]() is None


# Parts that are held


def test_a_part_is_taken_out_once_by_the_driver_that_it_is_held_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callers = [SimpleNamespace(id=1, name="a"), SimpleNamespace(id=2, name="b")]
    monkeypatch.setattr(owners, "caller", lambda: callers[0])
    part = HeldPart(2, "held")
    assert part.look() == "held"
    with pytest.raises(CheckpointError, match="'ps' holds nothing for worker 'a'"):
        part.take_out()
    callers.reverse()
    assert part.take_out() == "held"
    for again in (part.take_out, part.look):
        with pytest.raises(CheckpointError, match="'ps' has written this part, or put it"):
            again()


# Reading and comparing

NAME = "000001-step1-0123abcd"
FILE = "1-ps.pt"
CONTENT: dict[str, Any] = {
    "m": {"kind": "module", "state": saved("module", nn.Linear(2, 1))},
    "other": {"kind": "tensor", "state": torch.ones(1)},
}
Place = tuple[str, str, tuple[str, int, str], list[str]]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / NAME).mkdir()
    written = files.write_part(snapshots.part_path(str(tmp_path), NAME, FILE), encoded(CONTENT))
    return str(tmp_path), NAME, (FILE, *written), ["m"]


def origin(place: Place, directory: str, group: list[str]) -> Origin:
    manifest = Manifest(
        step=1,
        written="",
        driver="a",
        workers=["a", "b"],
        parts=[PartRecord("b", 1, *place[2], True)],
        items={path: EntryRecord(item["kind"], "b") for path, item in CONTENT.items()},
        versions={},
    )
    return manifest.to_bytes(), directory, place[1], {}, group, False


def test_what_a_worker_has_is_read_and_compared(place: Place) -> None:
    owned = OwnedState({"m": nn.Linear(2, 1)}, {}, {})
    content, report = owners.read_and_compare(owned, {}, origin(place, place[0], ["a"]), 1.0)
    assert not any(report.values())
    assert list(content) == ["m"]
    for value, problem in [
        (nn.Linear(2, 2), "m:weight has shape"),
        (torch.ones(1), "m is a module in the snapshot and a tensor here"),
    ]:
        owned = OwnedState({"m": value}, {}, {})
        _, report = owners.read_and_compare(owned, {}, origin(place, place[0], ["a"]), 1.0)
        assert problem in report["differing"][0]


def test_others_are_asked_in_turn_for_what_is_not_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    finds = {"b": False, "a": True}

    def ask(worker: str, function: Any, given: Any, timeout_s: float) -> Any:
        assert function is owners.read
        asked.append(worker)
        found = owners.read_entries(place[0], *given[1:])
        return found if finds[worker] else (LACKING, None)

    monkeypatch.setattr(owners, "_ask", ask)
    owned = OwnedState({"m": nn.Linear(2, 1)}, {}, {})
    content, report = owners.read_and_compare(owned, {}, origin(place, "/none", ["a", "b"]), 1.0)
    assert asked == ["b", "a"]
    assert not any(report.values())
    assert list(content) == ["m"]
    finds["a"] = False
    _, report = owners.read_and_compare(owned, {}, origin(place, "/none", ["a"]), 1.0)
    assert asked == ["b", "a", "a"]
    assert report["lacking"] == [(FILE, None)]


def test_a_damaged_file_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert owners.read_entries(*place)[0] == FOUND
    with open(snapshots.part_path(place[0], NAME, FILE), "ab") as file:
        file.write(b"more")
    outcome, problem = owners.read_entries(*place)
    assert outcome == CORRUPT
    assert "bytes" in problem

    def fail(path: str, expected: Any) -> str:
        raise OSError("a bad block")

    monkeypatch.setattr(files, "difference", fail)
    assert owners.read_entries(*place) == (CORRUPT, "it cannot be read: a bad block")


def test_a_file_that_belongs_to_another_user_is_not_damaged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, expected: Any) -> str:
        raise PermissionError("not yours")

    monkeypatch.setattr(files, "difference", fail)
    with pytest.raises(CheckpointError, match="may not read it") as caught:
        owners.read_entries(*place)
    assert not isinstance(caught.value, SnapshotCorrupt)
