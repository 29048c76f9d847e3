"""Saving: the driver's side. See ``docs/protocols/checkpoint.md``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import torch

from torchweft.agent.current import current
from torchweft.agent.slots import Slot
from torchweft.checkpoint import background
from torchweft.checkpoint.broadcast import Deadline
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.plan import Plan
from torchweft.checkpoint.save_attempt import Attempt
from torchweft.checkpoint.snapshots import Snapshot
from torchweft.errors import CallTimeout, ConfigurationError
from torchweft.ids import WorkerInfo
from torchweft.rpc import UNSET_RPC_TIMEOUT

Workers = bool | Iterable[str | int | WorkerInfo]


def save(
    directory: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    step: int,
    keep: int | None = None,
    gate: StepGate | None = None,
    random_states: Workers = True,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Snapshot:
    """Saves a state whose parts live on this and other workers. Blocks until all is on the disks.

    First every owner copies its part, at the point of the program where this is called. Then each
    owner writes its own file. Last, this worker writes the manifest, which completes the snapshot.
    If anything fails, or any process dies, there is no new snapshot, and earlier snapshots are
    unchanged. Always call it from the same worker, between two steps; if other workers train
    meanwhile, pass a ``gate``.

    Args:
        directory: Where snapshots are kept, on storage that all workers share, or on each worker's
            own under the same path. One run at a time may save there.
        state: The state to save: a dict with strings as keys, of modules, remote modules,
            distributed and local optimizers, tensors, plain values, objects with ``state_dict`` and
            ``load_state_dict``, ``torch.Generator``, references to such values on any worker, and
            dicts and lists of these.
        step: How many steps of the training have been done.
        keep: How many snapshots to keep; older snapshots are removed once the new snapshot is
            complete. None keeps all.
        gate: Is closed while the owners copy, so that no step through the gate is half done.
        random_states: The workers whose random number generators are saved as well: all workers of
            the group, some, or none.
        timeout: Seconds it may take; 0 for no limit, and by default ``WEFT_CHECKPOINT_TIMEOUT_S``.

    Returns:
        The snapshot.

    Raises:
        ArgumentTypeError: A value in ``state`` cannot be saved; names it, and its place.
        CheckpointError: A worker could not write its part: a full disk, say.
        WorkerLost: A worker was lost.
        CallTimeout: It took too long.
    """
    attempt, turn = _begin(directory, state, step, keep, gate, random_states, timeout)
    try:
        return attempt.finish()
    finally:
        turn.release()


def save_async(
    directory: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    step: int,
    keep: int | None = None,
    gate: StepGate | None = None,
    random_states: Workers = True,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Snapshot]:
    """Saves a state in the background: blocks only until every owner has copied its part.

    The copies are written while training continues; until then each owner has its part twice in
    memory. A save waits for an earlier save to the same directory.

    Args and errors are those of ``save``; the future's ``wait`` raises errors of writing.

    Returns:
        A future of the snapshot.
    """
    attempt, turn = _begin(directory, state, step, keep, gate, random_states, timeout)

    def work() -> Snapshot:
        try:
            return attempt.finish()
        finally:
            turn.release()

    # A process that ends still completes its pending saves.
    return background.start(work, "save", is_awaited=True)


def _begin(
    directory: str | os.PathLike[str],
    state: dict[str, Any],
    step: int,
    keep: int | None,
    gate: StepGate | None,
    random_states: Workers,
    timeout: float,
) -> tuple[Attempt, threading.Lock]:
    """Has all owners copy their parts; returns the attempt, and the lock to release at its end.

    Only one save to a directory runs at a time.
    """
    if not isinstance(step, int) or step < 0:
        raise ConfigurationError(f"step is {step!r}; pass the number of steps that are done")
    check_keep(keep)
    deadline = Deadline(timeout)
    absolute = os.path.abspath(directory)
    turn = _turn(absolute)
    if not turn.acquire(timeout=deadline.left_s() or -1):
        raise CallTimeout(
            f"an earlier snapshot is still being written to {absolute} after "
            f"{deadline.timeout_s:.1f} s; save less often, or pass a longer timeout",
            elapsed_s=deadline.timeout_s,
        )
    try:
        attempt = Attempt(absolute, step, keep, Plan(state, random_states), deadline)
        attempt.capture(gate)
    except BaseException:
        turn.release()
        raise
    return attempt, turn


def check_keep(keep: int | None) -> None:
    """Raises ConfigurationError if ``keep`` is neither None nor a positive integer."""
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ConfigurationError(
            f"keep is {keep!r}; pass how many snapshots to keep, at least 1, or None for all"
        )


def _no_locks() -> dict[str, threading.Lock]:
    return {}


_TURNS = Slot(_no_locks)
"""The lock of each directory that this worker saves to."""


def _turn(directory: str) -> threading.Lock:
    return current().slots[_TURNS].setdefault(directory, threading.Lock())
