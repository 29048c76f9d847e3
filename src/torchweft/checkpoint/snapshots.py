"""Finds and names the snapshots in a directory.

A snapshot is a directory that has a manifest; without a manifest it is the remains of an unfinished
save. The name contains the number in the order of writing, and the step. The rest of the name
distinguishes two snapshots that somehow got the same number. A snapshot's files never change.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass

from torchweft.errors import ConfigurationError

MANIFEST = "manifest.json"
_NAME = re.compile(r"(?P<number>\d{6,})-step(?P<step>\d+)-[0-9a-f]{8}")
_FILE = re.compile(r"\d+-[A-Za-z0-9_:-]{1,127}\.pt")


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


def list_snapshots(directory: str | os.PathLike[str]) -> list[Snapshot]:
    """Returns the snapshots in a directory in the order in which they were written.

    Reads names only; ``restore`` checks the content.
    """
    return [
        snapshot
        for _, snapshot in _entries(directory)
        if os.path.exists(os.path.join(snapshot.path, MANIFEST))
    ]


def latest(directory: str | os.PathLike[str]) -> Snapshot | None:
    """Returns the snapshot in a directory that was written last; None if there is none."""
    snapshots = list_snapshots(directory)
    return snapshots[-1] if snapshots else None


def new_name(directory: str, step: int) -> str:
    """Returns a name for the next snapshot, which sorts after the names of all begun snapshots."""
    number = 1 + max((number for (number, _), _ in _entries(directory)), default=0)
    return f"{number:06}-step{step}-{secrets.token_hex(4)}"


def snapshot_names(directory: str) -> list[str]:
    """Returns the names of all snapshots in a directory, complete or not."""
    return [snapshot.name for _, snapshot in _entries(directory)]


def part_path(directory: str, name: str, file: str) -> str:
    """Returns the path of a file of a snapshot.

    Raises:
        ConfigurationError: A name is not of a snapshot's file; the names may come from another
            worker.
    """
    if not _NAME.fullmatch(name) or not _FILE.fullmatch(file):
        raise ConfigurationError(f"{name}/{file} is no file of a snapshot")
    return os.path.join(directory, name, file)


def _entries(
    directory: str | os.PathLike[str],
) -> list[tuple[tuple[int, str], Snapshot]]:
    """Returns all entries that are named like a snapshot, sorted by number and name."""
    absolute = os.path.abspath(directory)
    try:
        names = os.listdir(absolute)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        if match := _NAME.fullmatch(name):
            snapshot = Snapshot(absolute, name, int(match["step"]))
            found.append(((int(match["number"]), name), snapshot))
    return sorted(found, key=lambda entry: entry[0])
