"""Saving: the driver's side. See ``docs/protocols/checkpoint.md``."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import platform
import secrets
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from torchweft.checkpoint import files, owner, parts, snapshots
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.owner import Deadline, raise_first
from torchweft.checkpoint.parts import Content, Described, Options
from torchweft.checkpoint.plan import Plan, group_numbers
from torchweft.checkpoint.snapshots import Item, Manifest, Parameter, Part, Snapshot
from torchweft.engine.threads.interrupts import acquire
from torchweft.engine.worker.agent import Slot
from torchweft.engine.worker.current import current
from torchweft.errors import CallCancelled, CallTimeout, ConfigurationError, NotInitialized
from torchweft.ids import WorkerInfo
from torchweft.optim.distributed import Failure, name_of, run_on_owners
from torchweft.rpc import UNSET_RPC_TIMEOUT, get_worker_infos

_log = logging.getLogger("torchweft")
_GIVE_UP_S = 5.0
"""How long an attempt that failed may take to clean up."""


class Attempt:
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
        plan: Plan,
        deadline: Deadline,
        needs: Iterable[str] = (),
    ) -> None:
        self._agent = current()
        self._me = self._agent.me
        self._keep = keep
        self._plan = plan
        self._deadline = deadline
        self._needs = list(needs)
        self._ticket = secrets.token_hex(8)
        # The remains of earlier attempts have numbers, too: take our number before removing them.
        self._snapshot = Snapshot(directory, snapshots.new_name(directory, step), step)
        snapshots.remove_unfinished(directory)
        self._workers = [info.name for info in get_worker_infos()]
        self._content: Content = {}
        self._kinds: dict[int, dict[str, str]] = {}
        self._described: dict[int, Described] = {}
        self._written: dict[int, Part] = {}

    # Copying

    def capture(self, gate: StepGate | None) -> None:
        """Has all owners copy their parts.

        Args:
            gate: Is closed while the owners copy.
        """
        for optimizer in self._plan.optimizers.values():
            optimizer.tell_changes()
        remote = {
            worker: (self._ticket, *places, worker in self._plan.random)
            for worker, places in self._plan.remote.items()
        }
        with_random = self._me.id in self._plan.random
        try:
            closed = gate.closed(self._deadline.left_s()) if gate else contextlib.nullcontext()
            with closed:
                answers, failures = run_on_owners(
                    owner.capture,
                    remote,
                    lambda: parts.take(self._plan.owned, with_random=with_random),
                    self._deadline.left_s,
                )
            self._raise("copying the state", failures)
        except BaseException:
            self.give_up()
            raise
        self._take_up(answers)

    def _take_up(self, answers: dict[int, Any]) -> None:
        own: parts.Taken = answers.pop(self._me.id)
        told = {self._me.id: (own.kinds, own.described, own.options), **answers}
        options: dict[str, Options] = {path: {} for path in self._plan.optimizers}
        for worker, (kinds, described, its_options) in told.items():
            self._kinds[worker], self._described[worker] = kinds, described
            for path, by_group in its_options.items():
                options[path].update(by_group)
        self._content = {**own.content, "options": options}

    # Writing

    def finish(self) -> Snapshot:
        """Has all owners write their files, then writes the manifest; returns the snapshot."""
        directory, step = self._snapshot.directory, self._snapshot.step
        doing = f"writing the snapshot of step {step}"
        try:
            with snapshots.named_errors(doing, directory, step, self._me.name):
                self._write_parts(doing)
                self._write_manifest()
        except BaseException:
            self.give_up()
            raise
        self._tidy()
        return self._snapshot

    def _write_parts(self, doing: str) -> None:
        os.makedirs(self._snapshot.path)
        answers, failures = run_on_owners(
            owner.write,
            {worker: (self._ticket, *self._place_of(worker)) for worker in self._plan.remote},
            lambda: files.write_part(self._path_of(self._me.id), self._content),
            self._deadline.left_s,
        )
        self._raise(doing, failures)
        self._content = {}
        for worker, (size_bytes, sha256) in answers.items():
            path = self._path_of(worker)
            is_seen = os.path.exists(path) and os.path.getsize(path) == size_bytes
            info = self._agent.peers[worker].info
            self._written[worker] = Part(
                info.name, info.id, os.path.basename(path), size_bytes, sha256, is_seen
            )

    def _place_of(self, worker: int) -> tuple[str, str, str]:
        info = self._agent.peers[worker].info
        return self._snapshot.directory, self._snapshot.name, f"{info.id}-{info.name}.pt"

    def _path_of(self, worker: int) -> str:
        return snapshots.part_path(*self._place_of(worker))

    def _write_manifest(self) -> None:
        manifest = Manifest(
            step=self._snapshot.step,
            written=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            driver=self._me.name,
            workers=self._workers,
            parts=sorted(self._written.values(), key=lambda part: part.rank),
            items={
                path: Item(kind, self._agent.peers[worker].name)
                for worker, its_kinds in self._kinds.items()
                for path, kind in its_kinds.items()
            },
            optimizers={path: self._parameters(path) for path in self._plan.optimizers},
            random=sorted(self._agent.peers[worker].name for worker in self._plan.random),
            versions={
                "weft": str(sys.modules["torchweft"].__version__),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            needs=self._needs,
            lists=self._plan.lists,
            classes=self._plan.classes,
        )
        path = os.path.join(self._snapshot.path, snapshots.MANIFEST)
        files.write_whole(path, lambda file: file.write(manifest.to_bytes()))
        # The names of the snapshot and of its directory must survive a crash of the machine, too.
        files.flush_directory(self._snapshot.directory)
        files.flush_directory(os.path.dirname(self._snapshot.directory))

    def _parameters(self, path: str) -> list[Parameter]:
        groups = group_numbers(self._plan.optimizers[path])
        found = {
            number: Parameter(name, groups[number], shape, self._agent.peers[worker].name)
            for worker, described in self._described.items()
            for number, (name, shape) in described.get(path, {}).items()
        }
        return [found[number] for number in sorted(found)]

    # Afterwards

    def _tidy(self) -> None:
        """Removes old snapshots, also on workers whose files are on disks of their own."""
        directory = self._snapshot.directory
        names = snapshots.names_to_keep(directory, self._keep)
        snapshots.keep_only(directory, names)
        elsewhere = {
            worker: (directory, names) for worker, part in self._written.items() if not part.is_seen
        }
        timeout_s = Deadline(_GIVE_UP_S).left_s
        _, failures = run_on_owners(owner.tidy, elsewhere, timeout_s=timeout_s)
        for worker, error in failures:
            _log.warning("old snapshots on worker %r stay there: %s", name_of(worker), str(error))

    def give_up(self) -> None:
        """Removes all remains of the attempt; the next save removes files that cannot be now."""
        self._content = {}
        snapshots.remove(self._snapshot.path)
        arguments = {
            worker: (self._ticket, *self._place_of(worker)) for worker in self._plan.remote
        }
        with contextlib.suppress(NotInitialized):
            run_on_owners(owner.discard, arguments, timeout_s=Deadline(_GIVE_UP_S).left_s)

    def _raise(self, what: str, failures: list[Failure]) -> None:
        raise_first(what, failures, self._snapshot.directory, self._snapshot.step)


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
    attempt, turn = _begin(
        directory, state, step, keep, gate, random_states, timeout, [each.name for each in needs]
    )
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
        return owner.in_background(work, "save", is_awaited=True)
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
) -> tuple[Attempt, threading.Lock]:
    """Has all owners copy their parts; returns the attempt, and the lock to release at its end.

    Only one save to a directory runs at a time.
    """
    if type(step) is not int or step < 0:
        raise ConfigurationError(f"step is {step!r}; pass the number of steps that are done")
    check_keep(keep)
    deadline = Deadline(timeout)
    absolute = snapshots.absolute(directory)
    turn = current().slots[_TURNS].setdefault(absolute, threading.Lock())
    is_mine: list[bool] = []
    try:
        if not acquire(turn, is_mine, timeout_s=deadline.left_s() or -1):
            raise CallTimeout(
                f"an earlier snapshot is still being written to {absolute} after "
                f"{deadline.timeout_s:.1f} s; save less often, or pass a longer timeout",
                elapsed_s=deadline.timeout_s,
            )
        attempt = Attempt(absolute, step, keep, Plan(state, random_states), deadline, needs)
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


_TURNS: Slot[dict[str, threading.Lock]] = Slot(dict)
"""The lock of each directory that this worker saves to."""
