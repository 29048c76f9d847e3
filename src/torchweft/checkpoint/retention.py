"""Removing snapshots that nobody wants any more, and what is left of saves that did not end."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection

from torchweft.checkpoint import files, snapshots

_log = logging.getLogger("torchweft")


def keep_only(directory: str, names: Collection[str]) -> None:
    """Removes every snapshot from a directory whose name is not among some.

    What cannot be removed stays, with a warning: a save must not fail for it.
    """
    for name in snapshots.snapshot_names(directory):
        if name not in names:
            remove(os.path.join(directory, name))


def remove(path: str) -> None:
    """Removes one snapshot: the manifest first, so that it is none from then on."""
    try:
        files.remove_file(os.path.join(path, snapshots.MANIFEST))
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("the old snapshot %s could not be removed: %s", path, str(error))


def remove_unfinished(directory: str) -> None:
    """Removes what is left of saves that did not end."""
    keep_only(directory, {snapshot.name for snapshot in snapshots.list_snapshots(directory)})


def remove_if_empty(path: str) -> None:
    """Removes a directory in which there is nothing."""
    try:
        os.rmdir(path)
    except OSError:
        pass


def names_to_keep(directory: str, keep: int | None) -> list[str]:
    """Returns the names of the newest ``keep`` snapshots, or of all."""
    present = [snapshot.name for snapshot in snapshots.list_snapshots(directory)]
    return present if keep is None else present[-keep:]
