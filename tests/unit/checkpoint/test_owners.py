"""Tests what owners do for a driver, and the deadline and errors of the driver's calls."""

from __future__ import annotations

import gc
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
from torchweft.checkpoint.owners import HeldPart
from torchweft.checkpoint.saving import Deadline, raise_first
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


def test_a_lost_worker_comes_before_all_else() -> None:
    errors = [OSError("disk"), ArgumentTypeError("x"), CallTimeout("late"), WorkerLost("gone")]
    failures = [Failure(0, error) for error in errors]
    for last in (4, 3, 2):
        with pytest.raises(type(errors[last - 1])) as caught:
            raise_first("saving", failures[:last], "/d", 3)
        assert caught.value is errors[last - 1]


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


def test_a_file_that_belongs_to_another_user_is_not_damaged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, expected: Any) -> str:
        raise PermissionError("not yours")

    monkeypatch.setattr(files, "difference", fail)
    with pytest.raises(CheckpointError, match="may not read it") as caught:
        owners.read_entries(*place)
    assert not isinstance(caught.value, SnapshotCorrupt)
