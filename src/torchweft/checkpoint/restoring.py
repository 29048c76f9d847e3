"""Restoring: the driver's side. See ``docs/protocols/checkpoint.md``."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Collection
from typing import Any

from torchweft.checkpoint import kinds, owner, parts, reading, snapshots
from torchweft.checkpoint.kinds import Differences
from torchweft.checkpoint.owner import Deadline, raise_first
from torchweft.checkpoint.parts import Described, Options
from torchweft.checkpoint.plan import SEPARATOR, Plan, group_numbers
from torchweft.checkpoint.reading import (
    Needs,
    Report,
    Source,
    assembled,
    assign_parameters,
    compare_classes,
    compare_parameters,
    compare_paths,
    grown_entries,
)
from torchweft.checkpoint.snapshots import BadManifest, Manifest, Snapshot, read_manifest
from torchweft.engine.worker.current import current
from torchweft.errors import (
    CheckpointError,
    NotInitialized,
    SnapshotCorrupt,
    SnapshotNotFound,
    StateMismatch,
)
from torchweft.files import read_plain
from torchweft.optim.distributed import Failure, run_on_owners
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
        CheckpointError: The directory cannot be read; or an entry could not be put in place, and
            the state is partly restored then.
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
        raise not_found(snapshots.absolute(directory), step, present)
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
        peers = [self._agent.find(info) for info in get_worker_infos()]
        self._ids = {peer.name: peer.id for peer in peers if peer.lost is None}
        self._manifest = self._read_manifest()
        self._grown = grown_entries(self._manifest, plan.values)
        self._content: parts.Content = {}
        self._remote: list[int] = []
        self._problems = Differences([], [], [])

    def _read_manifest(self) -> Manifest:
        path = os.path.join(self._snapshot.path, snapshots.MANIFEST)
        try:
            return read_manifest(read_plain(path, snapshots.MANIFEST_LIMIT_BYTES))
        except PermissionError as error:
            raise snapshots.not_permitted(self._snapshot.directory, path) from error
        except (BadManifest, OSError) as error:
            raise corrupt(self._snapshot, path, self._me.name, str(error)) from error

    # Reading and comparing

    def prepare(self) -> None:
        """Has every worker read the entries that it needs, and compare them with its own."""
        needs = self._needs()
        self._remote = [worker for worker in needs if worker != self._me.id]
        timeout_s = self._deadline.left_s()
        arguments = {
            worker: (
                self._ticket,
                *self._places(worker),
                self._snapshot.directory,
                self._sources(worker, needs[worker]),
                timeout_s,
            )
            for worker in self._remote
        }
        answers, failures = run_on_owners(
            owner.prepare, arguments, lambda: self._read_own(needs), self._deadline.left_s
        )
        self._raise("reading the snapshot", failures)
        self._check(answers)

    def _places(self, worker: int) -> tuple[Any, Any]:
        remote = self._plan.remote.get(worker)
        return ([], []) if remote is None else (remote.items, remote.optimizers)

    def _needs(self) -> dict[int, Needs]:
        """Returns the needs of each worker; the driver also needs the saving driver's part."""
        manifest, plan = self._manifest, self._plan
        paths = (plan.paths - self._grown.keys()).union(*self._grown.values())
        self._problems = compare_paths(manifest, paths, set(plan.optimizers))
        self._problems.differing.extend(compare_classes(manifest, plan.classes))
        needs: dict[int, Needs] = {self._me.id: Needs()}
        for path in sorted(paths & manifest.items.keys()):
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
            by_number = {
                number: parameter
                for each in described.values()
                for number, parameter in each.get(path, {}).items()
            }
            self._note(compare_parameters(path, saved, group_numbers(optimizer), by_number))
            for worker, each in described.items():
                assign_parameters(path, saved, each, needs.setdefault(worker, Needs()))

    def _describe(self) -> dict[int, Described]:
        remote = {
            worker: (places.items, places.optimizers)
            for worker, places in self._plan.remote.items()
            if places.optimizers
        }
        described, failures = run_on_owners(
            owner.describe,
            remote,
            lambda: parts.describe(self._plan.owned),
            self._deadline.left_s,
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
            functools.partial(owner.ask, directory, self._deadline.left_s()),
        )
        return report

    # Differences that prevent restoring

    def _check(self, reports: dict[int, Report]) -> None:
        for worker, report in reports.items():
            name = self._agent.peers[worker].name
            if report["lacking"]:
                file = report["lacking"][0]
                raise lacking(self._snapshot, self._manifest, file, name, self._ids)
            if report["corrupt"]:
                file, problem = report["corrupt"][0]
                path = os.path.join(self._snapshot.path, file)
                raise corrupt(self._snapshot, path, name, problem)
            self._note(Differences(report["missing"], report["unexpected"], report["differing"]))
        differing = self._problems.differing
        problems = self._problems if self._strict else Differences([], [], differing)
        if any(problems):
            raise mismatch(self._snapshot, problems)

    def _note(self, found: Differences) -> None:
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
        _, failures = run_on_owners(owner.apply, arguments, timeout_s=self._deadline.left_s)
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
        states = {path: item["state"] for path, item in self._content["items"].items()}
        own, lists = self._plan.owned.kinds(), set(self._manifest.lists or ())
        for path, leaf in self._plan.values.items():
            if path in self._grown:
                start = len(path + SEPARATOR)
                inner = {each[start:]: states[each] for each in self._grown[path]}
                leaf.put(assembled(path, inner, lists))
            elif path in states and own[path] == kinds.VALUE:
                leaf.put(states[path])
        # The random states come last: code that is called before might draw random numbers.
        parts.put(self._plan.owned, self._content, options, strict=self._strict)

    def give_up(self) -> None:
        """Has the workers drop the entries that they have read."""
        arguments = dict.fromkeys(self._remote, (self._ticket,))
        with contextlib.suppress(NotInitialized):
            run_on_owners(owner.drop, arguments, timeout_s=Deadline(_GIVE_UP_S).left_s)

    def _raise(self, what: str, failures: list[Failure]) -> None:
        raise_first(what, failures, self._snapshot.directory, self._snapshot.step)


# The errors for snapshots that cannot be restored

_NAMED = 8
"""How many entries a message names."""


def not_found(directory: str, step: int | None, present: list[Snapshot]) -> SnapshotNotFound:
    """Returns the error for a missing snapshot; ``present`` are the existing snapshots."""
    of_step = "" if step is None else f" of step {step}"
    there = ", ".join(str(snapshot.step) for snapshot in present)
    hint = f"; there are those of steps {there}" if present else ""
    if os.path.exists(os.path.join(directory, snapshots.MANIFEST)):
        hint = f": it is itself a snapshot; pass {os.path.dirname(directory)}, and its step"
    return SnapshotNotFound(
        f"there is no snapshot{of_step} in {directory}{hint}",
        directory=directory,
        step=step,
    )


def lacking(
    snapshot: Snapshot, manifest: Manifest, file: str, reader: str, group: Collection[str]
) -> SnapshotNotFound:
    """Returns the error for a file that neither the reader nor any worker it asked can see."""
    writer = next(part.worker for part in manifest.parts if part.file == file)
    absent = (
        "" if writer in group else f"; worker {writer!r}, which wrote it, is not in the group now"
    )
    return SnapshotNotFound(
        f"worker {reader!r} lacks the file {os.path.join(snapshot.path, file)} that worker "
        f"{writer!r} wrote, and nobody could read it for {reader!r}{absent}. Nothing was restored; "
        "keep snapshots on storage that all workers share, or have the worker run again where it "
        "was",
        directory=snapshot.directory,
        step=snapshot.step,
        worker=reader,
    )


def corrupt(snapshot: Snapshot, path: str, reader: str, problem: str) -> SnapshotCorrupt:
    """Returns the error for a file that differs from what was written."""
    present = reversed(snapshots.list_snapshots(snapshot.directory))
    steps = tuple(each.step for each in present if each.name != snapshot.name)
    instead = (
        f"restore another with step=...: there are {', '.join(map(str, steps))}"
        if steps
        else "there is no other snapshot"
    )
    return SnapshotCorrupt(
        f"the snapshot of step {snapshot.step} is damaged: {path}, as worker {reader!r} sees it: "
        f"{problem}. Nothing was restored; {instead}",
        directory=snapshot.directory,
        step=snapshot.step,
        worker=reader,
        file=path,
        alternatives=steps,
    )


def mismatch(snapshot: Snapshot, problems: Differences) -> StateMismatch:
    """Returns the error for a snapshot of another state."""
    said = [
        f"{what} {_listed(entries)}"
        for what, entries in [
            ("the snapshot lacks", problems.missing),
            ("only the snapshot has", problems.unexpected),
            ("they differ:", problems.differing),
        ]
        if entries
    ]
    return StateMismatch(
        f"the snapshot {snapshot.path} is of another state: {'; '.join(said)}. Nothing was "
        "restored; make the state as it was made when it was saved"
        + ("" if problems.differing else ", or pass strict=False"),
        directory=snapshot.directory,
        step=snapshot.step,
        missing=tuple(problems.missing),
        unexpected=tuple(problems.unexpected),
        differing=tuple(problems.differing),
    )


def _listed(entries: list[str]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(entries[:_NAMED]) + more
