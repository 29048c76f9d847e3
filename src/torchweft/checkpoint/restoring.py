"""Restoring: the driver's side. See ``docs/protocols/checkpoint.md``."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

from torchweft.agent.current import current
from torchweft.checkpoint import adapters, owner, parts, reading, restore_errors, snapshots
from torchweft.checkpoint.broadcast import Deadline, ask_all, raise_first
from torchweft.checkpoint.manifest import BadManifest, Manifest, read_manifest
from torchweft.checkpoint.matching import (
    Needs,
    Problems,
    assign_parameters,
    compare_parameters,
    compare_paths,
)
from torchweft.checkpoint.parts import Described, Options
from torchweft.checkpoint.plan import Plan
from torchweft.checkpoint.reading import Report, Source
from torchweft.checkpoint.snapshots import Snapshot
from torchweft.errors import CheckpointError, NotInitialized
from torchweft.rpc import UNSET_RPC_TIMEOUT, get_worker_infos

_GIVE_UP_S = 5.0


def restore(
    directory: str | os.PathLike[str],
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
            it, or this worker, reads the file for it.
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
        CheckpointError: An entry could not be put in place; the state is partly restored then.
    """
    snapshot = find(directory, step)
    restore_snapshot(snapshot, state, strict=strict, random_states=random_states, timeout=timeout)
    return snapshot


def restore_snapshot(
    snapshot: Snapshot,
    state: dict[str, Any],
    *,
    strict: bool,
    random_states: bool,
    timeout: float,
) -> None:
    """Restores a state from one snapshot; see ``restore``."""
    plan = Plan(state, False)
    restoring = Restoring(snapshot, plan, strict, random_states, Deadline(timeout))
    try:
        restoring.prepare()
        restoring.apply()
    except BaseException:
        restoring.give_up()
        raise


def find(directory: str | os.PathLike[str], step: int | None) -> Snapshot:
    """Returns the last snapshot in a directory, or the last one of a step.

    Raises:
        SnapshotNotFound: There is none; lists the existing snapshots.
    """
    present = snapshots.list_snapshots(directory)
    fitting = [snapshot for snapshot in present if step is None or snapshot.step == step]
    if not fitting:
        raise restore_errors.not_found(os.path.abspath(directory), step, present)
    return fitting[-1]


class Restoring:
    """Restores one snapshot: ``prepare``, which changes nothing, then ``apply``.

    Args:
        snapshot: The snapshot.
        plan: The owners of the entries.
        strict: Whether state and snapshot must have the same entries.
        with_random: Whether random number generators are restored.
        deadline: The deadline of the restore.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        plan: Plan,
        strict: bool,
        with_random: bool,
        deadline: Deadline,
    ) -> None:
        self._agent = current()
        self._me = self._agent.me
        self._snapshot = snapshot
        self._plan = plan
        self._strict = strict
        self._with_random = with_random
        self._deadline = deadline
        self._ticket = secrets.token_hex(8)
        self._ids = {info.name: self._agent.find(info).id for info in get_worker_infos()}
        self._manifest = self._read_manifest()
        self._content: parts.Content = {}
        self._remote: list[int] = []
        self._problems = Problems([], [], [])

    def _read_manifest(self) -> Manifest:
        path = os.path.join(self._snapshot.path, snapshots.MANIFEST)
        try:
            with open(path, "rb") as file:
                return read_manifest(file.read())
        except (BadManifest, OSError) as error:
            raise restore_errors.corrupt(self._snapshot, path, self._me.name, str(error)) from error

    # Reading and comparing

    def prepare(self) -> None:
        """Has every worker read the entries that it needs, and compare them with its own."""
        needs = self._needs()
        self._remote = [worker for worker in needs if worker != self._me.id]
        timeout_s = self._deadline.left_s()
        arguments = {
            worker: (
                self._ticket,
                self._me.id,
                *self._places(worker),
                self._snapshot.directory,
                self._sources(worker, needs[worker]),
                timeout_s,
            )
            for worker in self._remote
        }
        answers, failures = ask_all(
            owner.prepare, arguments, self._deadline, lambda: self._read_own(needs)
        )
        self._raise("reading the snapshot", failures)
        self._check(answers)

    def _places(self, worker: int) -> tuple[Any, Any]:
        remote = self._plan.remote.get(worker)
        return ([], []) if remote is None else (remote.items, remote.optimizers)

    def _needs(self) -> dict[int, Needs]:
        """Returns the needs of each worker; the driver also needs the saving driver's part."""
        manifest, plan = self._manifest, self._plan
        self._problems = compare_paths(manifest, plan.paths, set(plan.optimizers))
        needs: dict[int, Needs] = {self._me.id: Needs()}
        for path in sorted(plan.paths & manifest.items.keys()):
            worker = self._owner_of(path)
            needs.setdefault(worker, Needs()).item(manifest.items[path].worker, path)
        self._match_optimizers(needs)
        if self._with_random:
            for name in manifest.random:
                if name in self._ids:
                    needs.setdefault(self._ids[name], Needs()).random(name)
        if manifest.optimizers.keys() & plan.optimizers.keys():
            needs[self._me.id].by_writer.setdefault(manifest.driver, ([], {}, False))
        return needs

    def _owner_of(self, path: str) -> int:
        for worker, remote in self._plan.remote.items():
            if any(path == each for each, _ in remote.items):
                return worker
        return self._me.id

    def _match_optimizers(self, needs: dict[int, Needs]) -> None:
        described = self._describe()
        for path, optimizer in self._plan.optimizers.items():
            saved = self._manifest.optimizers.get(path)
            if saved is None:
                continue
            groups = [
                number
                for number, group in enumerate(optimizer.param_groups)
                for _ in group["params"]
            ]
            by_number = {
                number: parameter
                for each in described.values()
                for number, parameter in each.get(path, {}).items()
            }
            found = compare_parameters(path, saved, groups, by_number)
            self._note(found)
            for worker, each in described.items():
                assign_parameters(path, saved, each, needs.setdefault(worker, Needs()))

    def _describe(self) -> dict[int, Described]:
        remote = {
            worker: (places.items, places.optimizers)
            for worker, places in self._plan.remote.items()
            if places.optimizers
        }
        described, failures = ask_all(
            owner.describe, remote, self._deadline, lambda: parts.describe(self._plan.owned)
        )
        self._raise("looking at the optimizers", failures)
        return described

    def _sources(self, worker: int, needs: Needs) -> list[Source]:
        sources = []
        reader = self._agent.peers[worker].name
        for writer, wanted in needs.by_writer.items():
            part = self._manifest.part_of(writer)
            others = [name for name in dict.fromkeys([writer, self._me.name]) if name != reader]
            sources.append(
                (
                    self._snapshot.name,
                    part.file,
                    part.size_bytes,
                    part.sha256,
                    wanted,
                    [name for name in others if name in self._ids],
                )
            )
        return sources

    def _read_own(self, needs: dict[int, Needs]) -> Report:
        directory = self._snapshot.directory
        self._content, report = reading.read_and_compare(
            self._plan.owned,
            directory,
            self._sources(self._me.id, needs[self._me.id]),
            owner.asker(directory, self._deadline.left_s()),
        )
        return report

    # Problems that prevent restoring

    def _check(self, reports: dict[int, Report]) -> None:
        for worker, report in reports.items():
            name = self._agent.peers[worker].name
            if report["lacking"]:
                file = report["lacking"][0]
                raise restore_errors.lacking(self._snapshot, self._manifest, file, name, self._ids)
            if report["corrupt"]:
                file, problem = report["corrupt"][0]
                path = os.path.join(self._snapshot.path, file)
                raise restore_errors.corrupt(self._snapshot, path, name, problem)
            self._note(Problems(report["missing"], report["unexpected"], report["differing"]))
        differing = self._problems.differing
        problems = self._problems if self._strict else Problems([], [], differing)
        if any(problems):
            raise restore_errors.mismatch(self._snapshot, problems)

    def _note(self, found: Problems) -> None:
        for mine, theirs in zip(self._problems, found, strict=True):
            mine += theirs

    # Putting it in place

    def apply(self) -> None:
        """Has every worker put the entries that it has read in place."""
        saved: dict[str, Options] = self._content.get("options", {})
        options = {path: saved[path] for path in self._plan.optimizers if path in saved}
        arguments = {
            worker: (self._ticket, *self._places(worker), options, self._strict)
            for worker in self._remote
        }
        _, failures = ask_all(owner.apply, arguments, self._deadline)
        self._raise("restoring the state, which is partly restored now,", failures)
        for path, by_group in options.items():
            self._plan.optimizers[path].adopt([by_group[group] for group in sorted(by_group)])
        try:
            self._apply_own(options)
        except Exception as error:
            raise CheckpointError(
                f"restoring the state failed on worker {self._me.name!r}: "
                f"{type(error).__name__}: {error}. It is partly restored",
                directory=self._snapshot.directory,
                step=self._snapshot.step,
                worker=self._me.name,
            ) from error

    def _apply_own(self, options: dict[str, Options]) -> None:
        for path, item in self._content["items"].items():
            if item["kind"] == adapters.VALUE:
                leaf, saved = self._plan.values[path], item["state"]
                if isinstance(saved, (dict, list)) and type(leaf.value) is type(saved):
                    adapters.refill(leaf.value, saved)
                else:
                    leaf.container[leaf.key] = saved
        # The random states come last: code that is called before might draw random numbers.
        parts.put(self._plan.owned, self._content, options, strict=self._strict)

    def give_up(self) -> None:
        """Has the workers drop the entries that they have read."""
        arguments = dict.fromkeys(self._remote, (self._ticket,))
        with contextlib.suppress(NotInitialized):
            ask_all(owner.drop, arguments, Deadline(_GIVE_UP_S))

    def _raise(self, what: str, failures: list[Any]) -> None:
        raise_first(what, failures, self._snapshot.directory, self._snapshot.step)
