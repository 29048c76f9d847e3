"""Restoring: the driver's side. See ``docs/protocols/checkpoint.md``."""

from __future__ import annotations

import os
from typing import Any

from torchweft.checkpoint import dcp, owners, parts, snapshots
from torchweft.checkpoint.encoding import Part
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.kinds import PARAMETER, RANDOM, Content, Differences
from torchweft.checkpoint.owners import HeldPart, Origin, Prepared, Report
from torchweft.checkpoint.parts import Options, StatePlan
from torchweft.checkpoint.saving import Cut, Deadline, raise_first
from torchweft.checkpoint.snapshots import Manifest, Snapshot
from torchweft.errors import CheckpointError
from torchweft.extending import present_workers, run_on_owners, this_worker, worker_of
from torchweft.optim.states import fits_class
from torchweft.rpc import UNSET_RPC_TIMEOUT, RRef


def restore(
    directory: str | os.PathLike[str] | Snapshot,
    state: dict[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    random_states: bool = True,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Snapshot:
    """Restores a state from a snapshot, onto the same or other workers. Blocks.

    An entry goes to its present owner, by its name in the state; the optimizer's state of a
    parameter goes to the worker of the parameter. Objects keep their identity and get their content
    back, also lists and dicts of plain values; other plain values are replaced in ``state``. First
    every worker reads and compares the entries that it needs. Only if no worker finds a problem are
    they put in place. On as many workers of the same names, training continues bit by bit as it
    would have.

    Args:
        directory: Where snapshots are kept. If a worker cannot see a file, the worker that wrote
            it, or this worker, reads the file for it. Or a snapshot itself, or a folder of
            ``torch.distributed.checkpoint``, of which modules, tensors and plain values are
            restored, and all of a folder that ``to_dcp`` wrote.
        state: The state, created in the same way as when it was saved.
        step: The step of the snapshot; by default the last snapshot is restored.
        strict: Whether state and snapshot must have the same entries, and modules the same keys;
            otherwise the entries that both have are restored. Shapes must be the same in any case.
        random_states: Whether the random number generators of a worker are restored, if those of a
            worker of the same name were saved.
        timeout: Seconds it may take; 0 for no limit, and by default ``WEFT_CHECKPOINT_TIMEOUT_S``.

    Returns:
        The snapshot; its ``step`` is the number of steps that have been done.

    Raises:
        SnapshotNotFound: There is no such snapshot, or no worker can read a file; names the reader
            and the file.
        SnapshotCorrupt: A file is not as it was written; lists the other snapshots.
        StateMismatch: The snapshot is of another state; lists the differences.
        WorkerLost: A worker was lost.
        CheckpointError: The directory cannot be read; or an entry could not be put in place, and
            the state is partly restored then.
    """
    plan = StatePlan(state)
    if isinstance(directory, Snapshot):
        snapshot = directory
        manifest = snapshots.read_manifest_of(snapshot, this_worker().name)
    elif dcp.is_folder(directory):
        folder = os.path.abspath(directory)
        manifest = dcp.read_manifest(folder, plan.paths)
        snapshot = Snapshot(os.path.dirname(folder), os.path.basename(folder), manifest.step)
    else:
        snapshot = snapshots.find(directory, step)
        manifest = snapshots.read_manifest_of(snapshot, this_worker().name)
    Restoring(plan, manifest, strict, Deadline(timeout), snapshot=snapshot).run(random_states)
    return snapshot


def copy_state(
    source: dict[str, Any],
    target: dict[str, Any],
    *,
    gate: StepGate | None = None,
    strict: bool = True,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> None:
    """Copies a state into another one of the same names, whose entries may live elsewhere. Blocks.

    So a model moves onto other workers while the program runs, with the state of its optimizer. It
    is as if ``source`` were saved and restored into ``target``, without files: all owners copy
    their parts at one point, and each owner of the target takes what it needs from them.

    Args:
        source: The state; see ``save``. It is unchanged.
        target: The other state, made of other objects.
        gate: Is closed while the owners copy, so that no step through the gate is half done.
        strict: Whether both must have the same entries; see ``restore``.
        timeout: Seconds it may take; 0 for no limit, and by default ``WEFT_CHECKPOINT_TIMEOUT_S``.

    Raises:
        ArgumentTypeError: A value in ``source`` cannot be saved; names it.
        StateMismatch: The states differ; lists the differences. Nothing is changed.
        WorkerLost: A worker was lost.
        CallTimeout: It took too long.
    """
    deadline, held = Deadline(timeout), dict[str, RRef[HeldPart[Part]]]()
    cut = Cut(StatePlan(source), deadline)
    try:
        cut.take(gate)
        held.update(cut.parts_by_name())
        Restoring(StatePlan(target), cut.manifest(), strict, deadline, held=held).run(False)
    finally:
        cut.drop()
        held.clear()


class Restoring:
    """Puts a saved state into another one: reads and compares, which changes nothing, then applies.

    Args:
        plan: The owners of the entries.
        manifest: The description of what was saved.
        strict: Whether state and snapshot must have the same entries.
        deadline: The deadline of the restore.
        snapshot: The snapshot, for its place and for messages.
        held: The parts that workers hold, by their names, in place of a snapshot.
    """

    def __init__(
        self,
        plan: StatePlan,
        manifest: Manifest,
        strict: bool,
        deadline: Deadline,
        *,
        snapshot: Snapshot | None = None,
        held: dict[str, RRef[HeldPart[Part]]] | None = None,
    ) -> None:
        self._me = this_worker()
        self._plan = plan
        self._manifest = manifest
        self._strict = strict
        self._deadline = deadline
        self._snapshot = snapshot
        self._source_parts = held or {}
        self._held: dict[int, RRef[HeldPart[Prepared]]] = {}
        self._content: Content = {}
        self._directory = "" if snapshot is None else snapshot.directory
        self._step = None if snapshot is None else snapshot.step
        self._ids = {each.name: each.id for each in present_workers() if each.lost is None}

    def run(self, with_random: bool) -> None:
        """Reads, compares and applies.

        Args:
            with_random: Whether random number generators are restored.
        """
        items = self._manifest.items
        random = {
            worker
            for name, worker in self._ids.items()
            if with_random and parts.random_path(name) in items
        }
        try:
            reports = self._prepare({*self._plan.remote, *random} - {self._me.id}, with_random)
            self._check(reports)
            self._apply()
        except BaseException:
            owners.drop_parts(self._held)
            raise

    # Reading and comparing

    def _prepare(self, workers: set[int], with_random: bool) -> dict[int, Report]:
        """Has every worker read the entries that it needs, and compare them with its own."""
        plan, group = self._plan, [self._me.name, *self._ids]
        name = "" if self._snapshot is None else self._snapshot.name
        data = self._manifest.to_bytes()
        origin: Origin = (data, self._directory, name, self._source_parts, group, with_random)
        timeout_s = self._deadline.left_s()
        answers, failures = run_on_owners(
            owners.prepare,
            {worker: (plan.remote.get(worker, {}), origin, timeout_s) for worker in workers},
            lambda: owners.read_and_compare(plan.owned, plan.optimizers, origin, timeout_s),
            self._deadline.left_s,
        )
        own = answers.pop(self._me.id, None)
        self._held.update((worker, held) for worker, (_, held) in answers.items())
        reports = {worker: report for worker, (report, _) in answers.items()}
        answers.clear()
        raise_first("reading the snapshot", failures, self._directory, self._step)
        assert own is not None
        self._content, reports[self._me.id] = own
        return reports

    def _check(self, reports: dict[int, Report]) -> None:
        """Raises the error of the differences that prevent restoring."""
        problems = self._compare_entries(reports)
        for worker, report in reports.items():
            if self._snapshot is not None:
                name = worker_of(worker).name
                snapshots.raise_unreadable(self._snapshot, self._manifest, report, name, self._ids)
            problems.add(Differences(*(report[each] for each in Differences._fields)))
        if not self._strict:
            problems = Differences([], [], problems.differing)
        if any(problems):
            what = "the source" if self._snapshot is None else f"the snapshot {self._snapshot.path}"
            raise snapshots.mismatch(what, self._directory, self._step, problems)

    def _compare_entries(self, reports: dict[int, Report]) -> Differences:
        """Returns the entries that only the state or only the snapshot has, and other classes."""
        items, plan = self._manifest.items, self._plan
        here = plan.paths | plan.optimizers.keys()
        saved = {path for path, item in items.items() if item.kind not in (PARAMETER, RANDOM)}
        problems = Differences(sorted(here - saved), sorted(saved - here), [])
        stepped = {path for report in reports.values() for path in report["parameters"]}
        problems.unexpected.extend(
            parts.shown(path, optimizer)
            for optimizer in plan.optimizers
            for path in items
            if path.startswith(optimizer + parts.OF_PARAMETERS) and path not in stepped
        )
        # The state of one class fits another one only if one of them derives from the other. torch
        # loads any state, and fails in the next step.
        problems.differing.extend(
            f"{path} is of the class {theirs[0]} in the snapshot and {ours[0]} here"
            for path, ours in sorted(plan.classes.items())
            if (theirs := self._manifest.classes.get(path)) and not fits_class(theirs, ours)
        )
        return problems

    # Putting it in place

    def _apply(self) -> None:
        """Has every worker put the entries that it has read in place."""
        content = self._content
        options: dict[str, Options] = {
            path: content[path]["state"] for path in self._plan.optimizers if path in content
        }
        arguments = {worker: (held, options, self._strict) for worker, held in self._held.items()}
        _, failures = run_on_owners(owners.apply, arguments, timeout_s=self._deadline.left_s)
        what = "restoring the state, which is partly restored now,"
        raise_first(what, failures, self._directory, self._step)
        for path, by_group in options.items():
            self._plan.optimizers[path].adopt([by_group[group] for group in sorted(by_group)])
        try:
            # The random states come last: code that is called before might draw random numbers.
            self._plan.put(content, options, strict=self._strict)
        except Exception as error:
            raise CheckpointError(
                f"restoring the state failed on worker {self._me.name!r}: "
                f"{type(error).__name__}: {error}. It is partly restored",
                directory=self._directory,
                step=self._step,
                worker=self._me.name,
            ) from error
