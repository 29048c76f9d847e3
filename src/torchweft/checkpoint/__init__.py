"""Saves and restores snapshots of a training whose state is spread over many workers.

Every worker writes the state that it owns. A snapshot exists only if all workers have written
theirs.
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
"""The functions that the driver and other workers call on an owner of state. A strict worker that
takes part must list them in ``RpcBackendOptions(callables=...)``. They read, write and remove files
at paths that the caller gives, and save any object that a reference leads to."""

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
