"""Saving: the driver's side. See ``docs/protocols/checkpoint.md``.

A cut is a copy of a state, of one moment, in the memory of all owners. ``save`` writes it to files;
``copy_state`` in ``restoring`` puts it into another state.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from torchweft import knobs
from torchweft.arguments import limit_of
from torchweft.checkpoint import files, owners, parts, snapshots
from torchweft.checkpoint.encoding import Encoder, Part
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.kinds import OPTIMIZER
from torchweft.checkpoint.owners import HeldPart
from torchweft.checkpoint.parts import StatePlan
from torchweft.checkpoint.snapshots import EntryRecord, Manifest, PartRecord, Snapshot
from torchweft.errors import (
    CallCancelled,
    CallTimeout,
    CheckpointError,
    ConfigurationError,
    NotInitialized,
    WeftError,
    WorkerLost,
)
from torchweft.extending import (
    Failure,
    PerWorker,
    run_on_owners,
    this_worker,
    worker_of,
)
from torchweft.ids import WorkerInfo
from torchweft.rpc import UNSET_RPC_TIMEOUT, RRef, get_worker_infos

_log = logging.getLogger("torchweft")
Workers = bool | Iterable[str | int | WorkerInfo]


class Deadline:
    """The deadline of a save or restore.

    Args:
        timeout_s: Seconds from now; 0 for no limit, negative for the default.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = limit_of(timeout_s, knobs.CHECKPOINT_TIMEOUT_S.get())
        self._end_s = time.monotonic() + self.timeout_s if self.timeout_s else math.inf

    def left_s(self) -> float:
        """Returns the remaining seconds as the timeout of a call: 0 for no limit.

        Raises:
            CallTimeout: The deadline has passed.
        """
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise CallTimeout(
                f"the snapshot was not done within its {self.timeout_s:.1f} s; pass a longer "
                f"timeout, or set {knobs.CHECKPOINT_TIMEOUT_S.variable}",
                elapsed_s=self.timeout_s,
            )
        return 0.0 if math.isinf(left_s) else left_s


def raise_first(what: str, failures: list[Failure], directory: str, step: int | None) -> None:
    """Raises an error if there are failures.

    A lost worker, and then a timeout, goes before other errors, since it calls for a recovery of
    the group. An error of Weft is raised unchanged.

    Args:
        what: The failed operation, for the message.
        failures: The workers and their errors.
        directory: Where the snapshots are.
        step: The step of the snapshot.

    Raises:
        CheckpointError: Names all these workers; its cause is the first error.
    """
    if not failures:
        return
    first = min(failures, key=lambda failure: _urgency(failure.error))
    if isinstance(first.error, WeftError):
        raise first.error
    others = [failure for failure in failures if failure is not first]
    raise CheckpointError(
        f"{what} failed {'; and '.join(map(str, [first, *others]))}",
        directory=directory,
        step=step,
        worker=first.worker,
    ) from first.error


def _urgency(error: Exception) -> int:
    kinds = WorkerLost, CallTimeout, WeftError
    return next((place for place, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))


class Cut:
    """A copy of a state, in the memory of its owners.

    Args:
        plan: The owners of the entries.
        deadline: The deadline of the operation.
        directory: Where the cut will be written, for messages.
        step: The step of which it is, for messages.

    Attributes:
        part: The part of this worker.
        held: References to the parts that other workers hold, by the id of the worker.
    """

    def __init__(
        self, plan: StatePlan, deadline: Deadline, directory: str = "", step: int | None = None
    ) -> None:
        self._me = this_worker()
        self._plan = plan
        self._deadline = deadline
        self._place = directory, step
        self._workers = [info.name for info in get_worker_infos()]
        self._entries: dict[str, EntryRecord] = {}
        self.part = Part({}, {})
        self.held: dict[int, RRef[HeldPart[Part]]] = {}

    def take(self, gate: StepGate | None) -> None:
        """Has all owners copy their parts. Blocks until they have.

        Args:
            gate: Is closed while the owners copy.
        """
        plan, me = self._plan, self._me
        for optimizer in plan.optimizers.values():
            optimizer.tell_changes()
        remote = {worker: (places, worker in plan.random) for worker, places in plan.remote.items()}
        plan.owned.check_whole()
        closed = gate.closed(self._deadline.left_s()) if gate else contextlib.nullcontext()
        with closed:
            answers, failures = run_on_owners(
                owners.capture,
                remote,
                lambda: parts.take(plan.owned, with_random=me.id in plan.random),
                self._deadline.left_s,
            )
        self.part, own_options = answers.pop(me.id, (self.part, {}))
        self.held.update((worker, held) for worker, (_, _, held) in answers.items())
        kinds = {worker: kinds for worker, (kinds, _, _) in answers.items()}
        all_options = [own_options, *(options for _, options, _ in answers.values())]
        answers.clear()  # So that an error, which refers to this frame, keeps no part alive.
        raise_first("copying the state", failures, *self._place)
        encoder = Encoder(part=self.part)
        for path in plan.optimizers:
            groups = {
                group: each
                for options in all_options
                for group, each in options.get(path, {}).items()
            }
            encoder.add(OPTIMIZER, {path: groups})
        self.part = encoder.finish()
        kinds[me.id] = self.part.kinds()
        for worker, its_kinds in kinds.items():
            name = worker_of(worker).name
            self._entries.update(
                (path, EntryRecord(kind, name)) for path, kind in its_kinds.items()
            )

    def manifest(
        self, step: int = 0, files: Iterable[PartRecord] = (), needs: Iterable[str] = ()
    ) -> Manifest:
        """Returns the description of the cut, and of the files that it was written to."""
        return Manifest(
            step=step,
            written=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            driver=self._me.name,
            workers=self._workers,
            parts=sorted(files, key=lambda part: part.rank),
            items=dict(sorted(self._entries.items())),
            versions={
                "weft": str(sys.modules["torchweft"].__version__),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            needs=list(needs),
            classes=self._plan.classes,
        )

    def drop(self) -> None:
        """Stops holding the parts, here and on the other owners."""
        self.part = Part({}, {})
        owners.drop_parts(self.held)

    def parts_by_name(self) -> dict[str, RRef[HeldPart[Part]]]:
        """Returns references to all parts, by the name of their worker."""
        me = self._me
        own = RRef(HeldPart(me.id, self.part))
        held = {worker_of(worker).name: part for worker, part in self.held.items()}
        return {me.name: own, **held}


class SaveAttempt:
    """Saves one snapshot: ``capture``, then ``finish``, which may be called on another thread.

    Args:
        directory: Where snapshots are kept.
        step: How many steps have been done.
        keep: How many snapshots to keep; None for all.
        plan: The owners of the entries.
        deadline: The deadline of the save.
        needs: Names of the snapshots that this one cannot be restored without.
    """

    def __init__(
        self,
        directory: str,
        step: int,
        keep: int | None,
        plan: StatePlan,
        deadline: Deadline,
        needs: Iterable[str] = (),
    ) -> None:
        self._me = this_worker()
        self._keep = keep
        self._owners = list(plan.remote)
        self._deadline = deadline
        self._needs = list(needs)
        # The remains of earlier attempts have numbers, too: take our number before removing them.
        self._snapshot = Snapshot(directory, snapshots.new_name(directory, step), step)
        snapshots.remove_unfinished(directory)
        self._cut = Cut(plan, deadline, directory, step)

    def capture(self, gate: StepGate | None) -> None:
        """Has all owners copy their parts while ``gate`` is closed."""
        try:
            self._cut.take(gate)
        except BaseException:
            self.give_up()
            raise

    def finish(self) -> Snapshot:
        """Has all owners write their files, then writes the manifest; returns the snapshot."""
        directory, step = self._snapshot.directory, self._snapshot.step
        doing = f"writing the snapshot of step {step}"
        try:
            with snapshots.named_errors(doing, directory, step, self._me.name):
                written = self._write_parts(doing)
                manifest = self._cut.manifest(step, written, self._needs)
                path = os.path.join(self._snapshot.path, snapshots.MANIFEST)
                files.write_bytes(path, manifest.to_bytes())
                # The names of the snapshot and of its directory must survive a crash, too.
                files.flush(directory)
                files.flush(os.path.dirname(directory))
        except BaseException:
            self.give_up()
            raise
        self._tidy(written)
        return self._snapshot

    def _write_parts(self, doing: str) -> list[PartRecord]:
        os.makedirs(self._snapshot.path)
        cut, me = self._cut, self._me.id
        answers, failures = run_on_owners(
            owners.write,
            {worker: (cut.held[worker], *self._place_of(worker)) for worker in self._owners},
            lambda: files.write_part(self._path_of(me), cut.part),
            self._deadline.left_s,
        )
        raise_first(doing, failures, self._snapshot.directory, self._snapshot.step)
        cut.part = Part({}, {})
        return [self._record(worker, *written) for worker, written in answers.items()]

    def _record(self, worker: int, size_bytes: int, sha256: str) -> PartRecord:
        path, info = self._path_of(worker), worker_of(worker).info
        is_seen = os.path.exists(path) and os.path.getsize(path) == size_bytes
        return PartRecord(info.name, info.id, os.path.basename(path), size_bytes, sha256, is_seen)

    def _place_of(self, worker: int) -> tuple[str, str, str]:
        info = worker_of(worker).info
        return self._snapshot.directory, self._snapshot.name, snapshots.file_name(info)

    def _path_of(self, worker: int) -> str:
        return snapshots.part_path(*self._place_of(worker))

    def _tidy(self, written: list[PartRecord]) -> None:
        """Removes old snapshots, also on workers whose files are on disks of their own."""
        directory = self._snapshot.directory
        names = snapshots.names_to_keep(directory, self._keep)
        snapshots.keep_only(directory, names)
        elsewhere = {part.rank: (directory, names) for part in written if not part.is_seen}
        timeout_s = Deadline(owners.GIVE_UP_S).left_s
        _, failures = run_on_owners(owners.tidy, elsewhere, timeout_s=timeout_s)
        for each in failures:
            _log.warning("old snapshots on worker %r stay there: %s", each.worker, str(each.error))

    def give_up(self) -> None:
        """Removes all remains of the attempt; the next save removes files that cannot be now."""
        self._cut.drop()
        snapshots.remove(self._snapshot.path)
        with contextlib.suppress(NotInitialized):
            arguments = {worker: self._place_of(worker) for worker in self._owners}
            run_on_owners(owners.discard, arguments, timeout_s=Deadline(owners.GIVE_UP_S).left_s)


def save(
    directory: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    step: int,
    keep: int | None = None,
    gate: StepGate | None = None,
    random_states: Workers = True,
    timeout: float = UNSET_RPC_TIMEOUT,
    needs: Iterable[Snapshot] = (),
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
            the group that are not lost, some, or none.
        timeout: Seconds it may take; 0 for no limit, and by default ``WEFT_CHECKPOINT_TIMEOUT_S``.
        needs: Snapshots of this directory without which the state is not whole, as it has only the
            changes since. ``keep`` does not remove them while it keeps this one.

    Returns:
        The snapshot.

    Raises:
        ArgumentTypeError: A value in ``state`` cannot be saved; names it, and its place.
        CheckpointError: A worker could not write its part: a full disk, say; or the directory
            cannot be made or read.
        WorkerLost: A worker was lost.
        CallTimeout: It took too long.
    """
    names = [each.name for each in needs]
    attempt, turn = _begin(directory, state, step, keep, gate, random_states, timeout, names)
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
    claim = threading.Lock()

    def work() -> Snapshot:
        if not claim.acquire(blocking=False):
            raise CallCancelled("the save was interrupted when it began")
        try:
            return attempt.finish()
        finally:
            turn.release()

    attempt, turn = _begin(directory, state, step, keep, gate, random_states, timeout)
    try:
        # A process that ends still completes its pending saves.
        return owners.in_background(work, "save", is_awaited=True)
    except BaseException:
        if claim.acquire(blocking=False):  # Else its thread runs, and was interrupted afterwards.
            turn.release()
            attempt.give_up()
        raise


def _begin(
    directory: str | os.PathLike[str],
    state: dict[str, Any],
    step: int,
    keep: int | None,
    gate: StepGate | None,
    random_states: Workers,
    timeout: float,
    needs: Iterable[str] = (),
) -> tuple[SaveAttempt, threading.Lock]:
    """Has all owners copy their parts; returns the attempt, and the lock to release at its end.

    Only one save to a directory runs at a time.
    """
    if type(step) is not int or step < 0:
        raise ConfigurationError(f"step is {step!r}; pass the number of steps that are done")
    check_keep(keep)
    deadline = Deadline(timeout)
    absolute = snapshots.absolute(directory)
    turn = _TURNS.get().setdefault(absolute, threading.Lock())
    is_mine: list[bool] = []
    try:
        # In one step: an interrupt in between would leave a lock taken of which nothing knows.
        is_mine.extend(map(turn.acquire, (True,), (deadline.left_s() or -1,)))
        if not any(is_mine):
            raise CallTimeout(
                f"an earlier snapshot is still being written to {absolute} after "
                f"{deadline.timeout_s:.1f} s; save less often, or pass a longer timeout",
                elapsed_s=deadline.timeout_s,
            )
        plan = StatePlan(state, random_states)
        attempt = SaveAttempt(absolute, step, keep, plan, deadline, needs)
        attempt.capture(gate)
    except BaseException:
        if any(is_mine):
            turn.release()
        raise
    return attempt, turn


def check_keep(keep: int | None) -> None:
    """Raises ConfigurationError if ``keep`` is neither None nor a positive integer."""
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ConfigurationError(
            f"keep is {keep!r}; pass how many snapshots to keep, at least 1, or None for all"
        )


_TURNS: PerWorker[dict[str, threading.Lock]] = PerWorker(dict)
"""The lock of each directory that this worker saves to."""
