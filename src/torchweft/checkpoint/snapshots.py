"""The snapshots in a directory: their names, their manifests, and their removal.

A snapshot is a directory that has a manifest; without a manifest it is the remains of an unfinished
save. The name contains the number in the order of writing, and the step. The rest of the name
distinguishes two snapshots that somehow got the same number. A snapshot's files never change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchweft.arguments import kind_of
from torchweft.checkpoint import files
from torchweft.checkpoint.kinds import Differences
from torchweft.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    SnapshotCorrupt,
    SnapshotNotFound,
    StateMismatch,
    WeftError,
)
from torchweft.files import read_plain
from torchweft.ids import WorkerInfo

MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 1 << 30
_NAME = re.compile(r"(?P<number>\d{6,})-step(?P<step>\d+)-[0-9a-f]{8}")
_SUFFIX = ".pt"
_FILE = re.compile(rf"\d+-[A-Za-z0-9_:-]{{1,127}}{re.escape(_SUFFIX)}")


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot.

    Attributes:
        directory: Where it was saved, as an absolute path.
        name: The name of its own directory there.
        step: How many steps of the training had been done.
    """

    directory: str
    name: str
    step: int

    @property
    def path(self) -> str:
        """Its own directory."""
        return os.path.join(self.directory, self.name)


def absolute(directory: str | os.PathLike[str]) -> str:
    """Returns the absolute path of the directory where snapshots are kept.

    Raises:
        ArgumentTypeError: It is no path.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise ArgumentTypeError(
            f"directory is {kind_of(directory)}; pass the path where snapshots are kept"
        )
    return os.path.abspath(directory)


def list_snapshots(directory: str | os.PathLike[str]) -> list[Snapshot]:
    """Returns the snapshots in a directory in the order in which they were written.

    Reads names only; ``restore`` checks the content.

    Args:
        directory: Where snapshots are kept; there are none in a directory that does not exist.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    return [
        snapshot
        for snapshot in _begun(directory)
        if os.path.exists(os.path.join(snapshot.path, MANIFEST))
    ]


def latest(directory: str | os.PathLike[str]) -> Snapshot | None:
    """Returns the snapshot in a directory that was written last; None if there is none.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    snapshots = list_snapshots(directory)
    return snapshots[-1] if snapshots else None


def find(directory: str | os.PathLike[str], step: int | None = None) -> Snapshot:
    """Returns the last snapshot in a directory, or the last one of a step.

    Raises:
        SnapshotNotFound: There is none; lists the existing snapshots.
    """
    present = list_snapshots(directory)
    fitting = [snapshot for snapshot in present if step is None or snapshot.step == step]
    if not fitting:
        raise not_found(absolute(directory), step, present)
    return fitting[-1]


def not_permitted(directory: str, path: str) -> CheckpointError:
    """Returns the error for a file that is there, and that this process may not read.

    Not SnapshotCorrupt: the file may be as it was written, and an older snapshot is no way out.
    """
    return CheckpointError(
        f"{path} is there, but this process may not read it. Nothing was restored; give the user "
        f"with the id {os.getuid()} the right to read the snapshot, or run as the user that wrote "
        "it",
        directory=directory,
    )


@contextlib.contextmanager
def named_errors(
    doing: str, directory: str, step: int | None = None, worker: str = ""
) -> Iterator[None]:
    """Raises CheckpointError in place of an error of the system within a ``with`` block.

    Args:
        doing: What is done in the block, for the message.
        directory: Where the snapshots are.
        step: The step of the snapshot, where it is known.
        worker: Name of this worker, where the directory is that of a group.
    """
    try:
        yield
    except WeftError:
        raise  # Some of them are errors of the system as well.
    except OSError as error:
        place = f"{f'on worker {worker!r}, ' if worker else ''}in {directory}"
        raise CheckpointError(
            f"{doing} failed {place}: {type(error).__name__}: {error}",
            directory=directory,
            step=step,
            worker=worker,
        ) from error


def new_name(directory: str, step: int) -> str:
    """Returns a name for the next snapshot, which sorts after the names of all begun snapshots."""
    begun = _begun(directory)
    number = 1 + int(begun[-1].name.partition("-")[0]) if begun else 1
    return f"{number:06}-step{step}-{secrets.token_hex(4)}"


def file_name(info: WorkerInfo) -> str:
    """Returns the name of the file of a worker's part."""
    return f"{info.id}-{info.name}{_SUFFIX}"


def part_path(directory: str, name: str, file: str) -> str:
    """Returns the path of a file of a snapshot.

    Raises:
        ConfigurationError: A name is not of a snapshot's file; the names may come from another
            worker.
    """
    if not _NAME.fullmatch(name) or not _FILE.fullmatch(file):
        raise ConfigurationError(f"{name}/{file} is no file of a snapshot")
    return os.path.join(directory, name, file)


def _begun(directory: str | os.PathLike[str]) -> list[Snapshot]:
    """Returns all entries that are named like a snapshot, sorted by number and name."""
    whole = absolute(directory)
    with named_errors("looking for snapshots", whole):
        try:
            names = os.listdir(whole)
        except FileNotFoundError:
            return []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match["number"]), match.string))
    return [Snapshot(whole, match.string, int(match["step"])) for match in matches]


# The manifest: the files of a snapshot, their entries, and the workers that wrote them. It is JSON,
# so that a person can read it. It is written last.

FORMAT = 2


class BadManifest(ValueError):
    """A manifest is not as it was written, or of another version of the format."""


@dataclass(frozen=True)
class PartRecord:
    """The file of one worker.

    Attributes:
        worker: The name of the worker that wrote it.
        rank: Its rank.
        file: The name of the file in the snapshot's directory.
        size_bytes: Its size.
        sha256: The SHA-256 of its bytes.
        is_seen: Whether the driver saw the file as well, so the directory is on shared storage.
    """

    worker: str
    rank: int
    file: str
    size_bytes: int
    sha256: str
    is_seen: bool


@dataclass(frozen=True)
class EntryRecord:
    """One entry of the state.

    Attributes:
        kind: Its kind; see ``kinds``.
        worker: The name of the worker whose file contains it.
    """

    kind: str
    worker: str


@dataclass(frozen=True)
class Manifest:
    """The description of a snapshot, available without reading its parts.

    Attributes:
        step: How many steps of the training had been done.
        written: The time of writing, in UTC, in the form of ISO 8601.
        driver: The name of the worker that saved it.
        workers: The names of all workers of the group at that time, by rank.
        parts: The files, by rank of their workers.
        items: The entries of the parts, by path; see ``parts``.
        versions: The versions of Weft, PyTorch and Python that wrote it.
        needs: The names of the snapshots that it cannot be restored without.
        classes: The names of the class of each optimizer that the driver knows and of the optimizer
            classes that it derives from, by path.
    """

    step: int
    written: str
    driver: str
    workers: list[str]
    parts: list[PartRecord]
    items: dict[str, EntryRecord]
    versions: dict[str, str]
    needs: list[str] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=dict)

    def part_of(self, worker: str) -> PartRecord:
        """Returns the file that a worker wrote."""
        return next(part for part in self.parts if part.worker == worker)

    def to_bytes(self) -> bytes:
        """Returns the manifest as JSON, with its own hash."""
        content = dataclasses.asdict(self)
        whole = {"format": FORMAT, "sha256": _hash(content), "snapshot": content}
        return json.dumps(whole, indent=1).encode() + b"\n"


def read_manifest(data: bytes) -> Manifest:
    """Returns a manifest from the bytes that ``to_bytes`` returned.

    Raises:
        BadManifest: The bytes were changed, or are of another version of the format.
    """
    try:
        whole = json.loads(data)
        version, content = whole["format"], whole["snapshot"]
        if version != FORMAT:
            raise BadManifest(
                f"it has version {version!r} of the format, and this Weft reads {FORMAT}"
            )
        if whole["sha256"] != _hash(content):
            raise BadManifest("its content is not what was written (SHA-256 differs)")
        return _manifest(content)
    except BadManifest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadManifest(f"it is no manifest ({type(error).__name__}: {error})") from error


def read_manifest_of(snapshot: Snapshot, reader: str = "") -> Manifest:
    """Returns the manifest of a snapshot; ``reader`` is the name of this worker, if it has one.

    Raises:
        SnapshotCorrupt: It is damaged.
        CheckpointError: This process may not read it.
    """
    path = os.path.join(snapshot.path, MANIFEST)
    try:
        return read_manifest(read_plain(path, MANIFEST_LIMIT_BYTES))
    except PermissionError as error:
        raise not_permitted(snapshot.directory, path) from error
    except (BadManifest, OSError) as error:
        raise corrupt(snapshot, path, reader, str(error)) from error


def _manifest(content: dict[str, Any]) -> Manifest:
    return Manifest(
        **{
            **content,
            "parts": [PartRecord(**part) for part in content["parts"]],
            "items": {path: EntryRecord(**item) for path, item in content["items"].items()},
        }
    )


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# Removal of snapshots that are no longer kept, and of the remains of unfinished saves

_log = logging.getLogger("torchweft")


def keep_only(directory: str, names: Collection[str]) -> None:
    """Removes every snapshot whose name is not in ``names`` from a directory.

    A snapshot that cannot be removed stays, with a warning: a save must not fail because of it.
    """
    for snapshot in _begun(directory):
        if snapshot.name not in names:
            remove(snapshot.path)


def remove(path: str) -> None:
    """Removes one snapshot: the manifest first, so that the rest no longer counts as a snapshot."""
    try:
        files.remove_file(os.path.join(path, MANIFEST))
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("the old snapshot %s could not be removed: %s", path, str(error))


def remove_unfinished(directory: str) -> None:
    """Removes the remains of unfinished saves."""
    keep_only(directory, {snapshot.name for snapshot in list_snapshots(directory)})


def remove_if_empty(path: str) -> None:
    """Removes a directory if it is empty."""
    try:
        os.rmdir(path)
    except OSError:
        pass


def names_to_keep(directory: str, keep: int | None) -> list[str]:
    """Returns the names of the newest ``keep`` snapshots and those they need; of all if None."""
    present = [snapshot.name for snapshot in list_snapshots(directory)]
    if keep is None:
        return present
    kept, found = set[str](), present[-keep:]
    while found:
        kept.update(found)
        found = [each for name in found for each in _needs(directory, name) if each not in kept]
    return [name for name in present if name in kept]


def _needs(directory: str, name: str) -> list[str]:
    try:
        path = os.path.join(directory, name, MANIFEST)
        return read_manifest(read_plain(path, MANIFEST_LIMIT_BYTES)).needs
    except (BadManifest, OSError):
        return []  # It cannot be restored at all.


# The errors for snapshots that cannot be restored

_NAMED = 8
"""How many entries a message names."""


def not_found(directory: str, step: int | None, present: list[Snapshot]) -> SnapshotNotFound:
    """Returns the error for a missing snapshot; ``present`` are the existing snapshots."""
    of_step = "" if step is None else f" of step {step}"
    there = ", ".join(str(snapshot.step) for snapshot in present)
    hint = f"; there are those of steps {there}" if present else ""
    if os.path.exists(os.path.join(directory, MANIFEST)):
        hint = f": it is itself a snapshot; pass {os.path.dirname(directory)}, and its step"
    return SnapshotNotFound(
        f"there is no snapshot{of_step} in {directory}{hint}",
        directory=directory,
        step=step,
    )


def raise_unreadable(
    snapshot: Snapshot,
    manifest: Manifest,
    report: Mapping[str, Any],
    reader: str,
    group: Collection[str],
) -> None:
    """Raises the error of the first file that a worker could not read, if there is one."""
    for file, _ in report["lacking"]:
        raise lacking(snapshot, manifest, file, reader, group)
    for file, problem in report["corrupt"]:
        raise corrupt(snapshot, os.path.join(snapshot.path, file), reader, problem)


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
    present = reversed(list_snapshots(snapshot.directory))
    steps = tuple(each.step for each in present if each.name != snapshot.name)
    instead = (
        f"restore another with step=...: there are {', '.join(map(str, steps))}"
        if steps
        else "there is no other snapshot"
    )
    seen = f", as worker {reader!r} sees it" if reader else ""
    return SnapshotCorrupt(
        f"the snapshot of step {snapshot.step} is damaged: {path}{seen}: {problem}. Nothing was "
        f"restored; {instead}",
        directory=snapshot.directory,
        step=snapshot.step,
        worker=reader,
        file=path,
        alternatives=steps,
    )


def mismatch(what: str, directory: str, step: int | None, problems: Differences) -> StateMismatch:
    """Returns the error for a snapshot of another state; ``what`` names it."""
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
        f"{what} is of another state: {'; '.join(said)}. Nothing was "
        "restored; make the state as it was made when it was saved"
        + ("" if problems.differing else ", or pass strict=False"),
        directory=directory,
        step=step,
        missing=tuple(problems.missing),
        unexpected=tuple(problems.unexpected),
        differing=tuple(problems.differing),
    )


def _listed(entries: list[str]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(entries[:_NAMED]) + more
