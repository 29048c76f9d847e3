"""The errors for snapshots that cannot be restored."""

from __future__ import annotations

import os
from collections.abc import Collection

from torchweft.checkpoint import snapshots
from torchweft.checkpoint.manifest import Manifest
from torchweft.checkpoint.matching import Problems
from torchweft.checkpoint.snapshots import Snapshot
from torchweft.errors import SnapshotCorrupt, SnapshotNotFound, StateMismatch

_NAMED = 8
"""How many entries a message names."""


def not_found(directory: str, step: int | None, present: list[Snapshot]) -> SnapshotNotFound:
    """Returns the error for a missing snapshot; ``present`` are the existing snapshots."""
    of_step = "" if step is None else f" of step {step}"
    there = ", ".join(str(snapshot.step) for snapshot in present)
    return SnapshotNotFound(
        f"there is no snapshot{of_step} in {directory}"
        + (f"; there are those of steps {there}" if present else ""),
        directory=directory,
        step=step,
    )


def lacking(
    snapshot: Snapshot, manifest: Manifest, file: str, reader: str, group: Collection[str]
) -> SnapshotNotFound:
    """Returns the error for a file that neither the reader nor any worker it asked can see."""
    writer = next(part.worker for part in manifest.parts if part.file == file)
    absent = (
        "" if writer in group else f"; worker {writer!r}, which wrote it, is not in the group now"
    )
    return SnapshotNotFound(
        f"worker {reader!r} lacks the file {os.path.join(snapshot.path, file)} that worker "
        f"{writer!r} wrote, and nobody could read it for {reader!r}{absent}. Nothing was restored; "
        "keep snapshots on storage that all workers share, or have the worker run again where it "
        "was",
        directory=snapshot.directory,
        step=snapshot.step,
        worker=reader,
    )


def corrupt(snapshot: Snapshot, path: str, reader: str, problem: str) -> SnapshotCorrupt:
    """Returns the error for a file that differs from what was written."""
    present = reversed(snapshots.list_snapshots(snapshot.directory))
    steps = tuple(each.step for each in present if each.name != snapshot.name)
    instead = (
        f"restore another with step=...: there are {', '.join(map(str, steps))}"
        if steps
        else "there is no other snapshot"
    )
    return SnapshotCorrupt(
        f"the snapshot of step {snapshot.step} is damaged: {path}, as worker {reader!r} sees it: "
        f"{problem}. Nothing was restored; {instead}",
        directory=snapshot.directory,
        step=snapshot.step,
        worker=reader,
        file=path,
        alternatives=steps,
    )


def mismatch(snapshot: Snapshot, problems: Problems) -> StateMismatch:
    """Returns the error for a snapshot of another state."""
    said = [
        f"{what} {_listed(entries)}"
        for what, entries in [
            ("the snapshot lacks", problems.missing),
            ("only the snapshot has", problems.unexpected),
            ("they differ:", problems.differing),
        ]
        if entries
    ]
    return StateMismatch(
        f"the snapshot {snapshot.path} is of another state: {'; '.join(said)}. Nothing was "
        "restored; make the state as it was made when it was saved"
        + ("" if problems.differing else ", or pass strict=False"),
        directory=snapshot.directory,
        step=snapshot.step,
        missing=tuple(problems.missing),
        unexpected=tuple(problems.unexpected),
        differing=tuple(problems.differing),
    )


def _listed(entries: list[str]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(entries[:_NAMED]) + more
