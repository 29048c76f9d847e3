"""Tests the loop with fakes that only record saving and restoring."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweft.checkpoint import loop
from torchweft.checkpoint.loop import resumable
from torchweft.checkpoint.snapshots import Snapshot
from torchweft.errors import CheckpointError, ConfigurationError, SnapshotCorrupt


class Disk:
    """A fake disk of snapshots, by step; some are damaged."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.damaged: set[int] = set()
        self.restored: list[int] = []
        self.pending: list[tuple[int, torch.futures.Future[Snapshot]]] = []
        self.is_slow = False

    def list_snapshots(self, directory: str) -> list[Snapshot]:
        return [Snapshot(directory, f"at{step}", step) for step in self.steps]

    def restore(self, snapshot: Snapshot, state: Any, **how: Any) -> None:
        if snapshot.step in self.damaged:
            raise SnapshotCorrupt(f"{snapshot.step} is damaged")
        self.restored.append(snapshot.step)

    def save_async(self, directory: str, state: Any, *, step: int, **how: Any) -> Any:
        future: torch.futures.Future[Snapshot] = torch.futures.Future()
        self.pending.append((step, future))
        if not self.is_slow:
            self.finish()
        return future

    def finish(self) -> None:
        step, future = self.pending.pop(0)
        self.steps.append(step)
        future.set_result(Snapshot("d", f"at{step}", step))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(loop.snapshots, "list_snapshots", made.list_snapshots)
    monkeypatch.setattr(loop, "restore", made.restore)
    monkeypatch.setattr(loop, "save_async", made.save_async)
    return made


def test_steps_that_were_begun_are_not_done_again(disk: Disk) -> None:
    steps = resumable(7, "d", {}, every=3)
    for step in steps:
        if step == 4:
            break
    with pytest.raises(ConfigurationError, match="from 0 on were begun before"):
        list(steps)
    assert list(resumable(7, "d", {}, every=3)) == [3, 4, 5, 6]


def test_notice_that_the_host_is_given_up_saves_and_ends_the_program(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notice = tmp_path / "notice"
    monkeypatch.setenv("WEFT_NOTICE_FILE", str(notice))
    steps = iter(resumable(9, "d", {}, every=100))
    assert [next(steps) for _ in range(4)] == [0, 1, 2, 3]
    notice.touch()
    with pytest.raises(SystemExit) as caught:
        next(steps)
    assert caught.value.code == 75
    assert disk.steps == [4]


def test_notice_in_the_last_step_ends_nothing(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEFT_NOTICE_FILE", str(tmp_path))
    disk.steps = [5]
    assert list(resumable(6, "d", {}, every=100)) == [5]
    assert disk.steps == [5, 6]


def test_it_saves_by_the_clock(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in resumable(6, "d", {}, every_s=10.0):
        now[0] += 4.0
    assert disk.steps == [3, 6]


def test_in_the_background_a_save_waits_for_the_one_before(disk: Disk) -> None:
    disk.is_slow = True
    steps = iter(resumable(9, "d", {}, every=2, in_background=True))
    assert [next(steps) for _ in range(4)] == [0, 1, 2, 3]
    assert [step for step, _ in disk.pending] == [2]
    assert disk.steps == []
    disk.finish()
    assert next(steps) == 4
    assert [step for step, _ in disk.pending] == [4]


def test_a_save_that_failed_in_the_background_is_raised_after_the_next_step(disk: Disk) -> None:
    disk.is_slow = True
    steps = iter(resumable(9, "d", {}, every=2, in_background=True))
    assert [next(steps) for _ in range(3)] == [0, 1, 2]
    disk.pending[0][1].set_exception(CheckpointError("disk full"))
    with pytest.raises(CheckpointError, match="disk full"):
        next(steps)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"steps": -1, "every": 1}, "steps is -1"),
        ({"steps": 2}, "say when to save"),
        ({"steps": 2, "every": 0}, "every is 0"),
        ({"steps": 2, "every_s": 0.0}, r"every_s is 0\.0"),
        ({"steps": 2, "every": 1, "keep": 0}, "keep is 0"),
    ],
    ids=["steps", "never", "every", "every_s", "keep"],
)
def test_what_cannot_work_is_refused(
    disk: Disk, tmp_path: Path, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        resumable(arguments.pop("steps"), tmp_path, {}, **arguments)
