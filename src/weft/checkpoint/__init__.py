"""Snapshots of a training whose parts live on many workers, and going on from them.

Every worker writes what it owns; a snapshot is there when all have, or not at all.
"""

from weft.checkpoint.gate import StepGate
from weft.checkpoint.loop import Resumable, resumable
from weft.checkpoint.restoring import restore
from weft.checkpoint.saving import save, save_async
from weft.checkpoint.snapshots import Snapshot, latest, list_snapshots

__all__ = [
    "Resumable",
    "Snapshot",
    "StepGate",
    "latest",
    "list_snapshots",
    "restore",
    "resumable",
    "save",
    "save_async",
]
