"""Saves and restores snapshots of a training whose state is spread over many workers.

Every worker writes the state that it owns. A snapshot exists only if all workers have written
theirs. ``copy_state`` moves such a state onto other workers.
"""

from torchweft.checkpoint import gate, owners
from torchweft.checkpoint.dcp import to_dcp
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.loop import resumable
from torchweft.checkpoint.restoring import copy_state, restore
from torchweft.checkpoint.saving import save, save_async
from torchweft.checkpoint.snapshots import Snapshot, find, latest, list_snapshots

CALLABLES = (
    *(owners.apply, owners.capture, owners.discard, owners.drop, owners.prepare, owners.read),
    *(owners.read_held, owners.tidy, owners.write, *gate.CALLABLES),
)
"""The functions that the driver and other workers call on an owner of state. A strict worker that
takes part must list them in ``RpcBackendOptions(callables=...)``. They read, write and remove files
at paths that the caller gives, and save any object that a reference leads to."""

__all__ = [
    "CALLABLES",
    "Snapshot",
    "StepGate",
    "copy_state",
    "find",
    "latest",
    "list_snapshots",
    "restore",
    "resumable",
    "save",
    "save_async",
    "to_dcp",
]
