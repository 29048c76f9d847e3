"""Snapshots of a training whose parts live on many workers, and going on from them.

Every worker writes what it owns; a snapshot is there when all have, or not at all.
"""

from torchweft.checkpoint import gate, owner
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.loop import Resumable, resumable
from torchweft.checkpoint.restoring import restore
from torchweft.checkpoint.saving import save, save_async
from torchweft.checkpoint.snapshots import Snapshot, latest, list_snapshots

CALLABLES = (
    *(owner.apply, owner.capture, owner.describe, owner.discard, owner.drop, owner.prepare),
    *(owner.read, owner.tidy, owner.write, *gate.CALLABLES),
)
"""What others call on the workers whose parts are saved and restored. A strict worker that is to
take part names them in ``RpcBackendOptions(callables=...)``: they read, write and remove files
where the caller says, and save whatever a reference leads to."""

__all__ = [
    "CALLABLES",
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
