"""Removes snapshots that are no longer kept, and the remains of unfinished saves."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection

from torchweft.checkpoint import files, snapshots

_log = logging.getLogger("torchweft")


def keep_only(directory: str, names: Collection[str]) -> None:
    """Removes every snapshot whose name is not in ``names`` from a directory.

    A snapshot that cannot be removed stays, with a warning: a save must not fail because of it.
    """
    for name in snapshots.snapshot_names(directory):
        if name not in names:
            remove(os.path.join(directory, name))


def remove(path: str) -> None:
    """Removes one snapshot: the manifest first, so that the rest no longer counts as a snapshot."""
    try:
        files.remove_file(os.path.join(path, snapshots.MANIFEST))
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("the old snapshot %s could not be removed: %s", path, str(error))


def remove_unfinished(directory: str) -> None:
    """Removes the remains of unfinished saves."""
    keep_only(directory, {snapshot.name for snapshot in snapshots.list_snapshots(directory)})


def remove_if_empty(path: str) -> None:
    """Removes a directory if it is empty."""
    try:
        os.rmdir(path)
    except OSError:
        pass


def names_to_keep(directory: str, keep: int | None) -> list[str]:
    """Returns the names of the newest ``keep`` snapshots, or of all if it is None."""
    present = [snapshot.name for snapshot in snapshots.list_snapshots(directory)]
    return present if keep is None else present[-keep:]
