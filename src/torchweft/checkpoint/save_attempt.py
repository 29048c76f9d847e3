"""One attempt to save a snapshot, from the owners' copies to the manifest."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import platform
import secrets
import sys
from typing import Any

import torch

from torchweft.agent.current import current
from torchweft.checkpoint import files, owner, parts, retention, snapshots
from torchweft.checkpoint.broadcast import Deadline, ask_all, raise_first
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.manifest import Item, Manifest, Parameter, Part
from torchweft.checkpoint.parts import Content, Described, Options
from torchweft.checkpoint.plan import Plan
from torchweft.checkpoint.snapshots import Snapshot
from torchweft.errors import NotInitialized
from torchweft.rpc import get_worker_infos

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
    """

    def __init__(
        self, directory: str, step: int, keep: int | None, plan: Plan, deadline: Deadline
    ) -> None:
        self._agent = current()
        self._me = self._agent.me
        self._keep = keep
        self._plan = plan
        self._deadline = deadline
        self._ticket = secrets.token_hex(8)
        # The remains of earlier attempts have numbers, too: take our number before removing them.
        self._snapshot = Snapshot(directory, snapshots.new_name(directory, step), step)
        retention.remove_unfinished(directory)
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
            worker: (self._ticket, self._me.id, *places, worker in self._plan.random)
            for worker, places in self._plan.remote.items()
        }
        with_random = self._me.id in self._plan.random
        try:
            closed = gate.closed(self._deadline.left_s()) if gate else contextlib.nullcontext()
            with closed:
                answers, failures = ask_all(
                    owner.capture,
                    remote,
                    self._deadline,
                    lambda: parts.take(self._plan.owned, with_random=with_random),
                )
            self._raise("copying the state", failures)
        except BaseException:
            self._give_up()
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
        try:
            self._write_parts()
            self._write_manifest()
        except BaseException:
            self._give_up()
            raise
        self._tidy()
        return self._snapshot

    def _write_parts(self) -> None:
        os.makedirs(self._snapshot.path)
        answers, failures = ask_all(
            owner.write,
            {worker: (self._ticket, *self._place_of(worker)) for worker in self._plan.remote},
            self._deadline,
            lambda: files.write_part(self._path_of(self._me.id), self._content),
        )
        self._raise(f"writing the snapshot of step {self._snapshot.step}", failures)
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
        )
        path = os.path.join(self._snapshot.path, snapshots.MANIFEST)
        files.write_whole(path, lambda file: file.write(manifest.to_bytes()))
        # The names of the snapshot and of its directory must survive a crash of the machine, too.
        files.flush_directory(self._snapshot.directory)
        files.flush_directory(os.path.dirname(self._snapshot.directory))

    def _parameters(self, path: str) -> list[Parameter]:
        groups = [
            group
            for group, content in enumerate(self._plan.optimizers[path].param_groups)
            for _ in content["params"]
        ]
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
        names = retention.names_to_keep(directory, self._keep)
        retention.keep_only(directory, names)
        elsewhere = {
            worker: (directory, names) for worker, part in self._written.items() if not part.is_seen
        }
        _, failures = ask_all(owner.tidy, elsewhere, Deadline(_GIVE_UP_S))
        for worker, error in failures:
            _log.warning("old snapshots on worker %r stay there: %s", worker, str(error))

    def _give_up(self) -> None:
        """Removes all remains of the attempt; the next save removes files that cannot be now."""
        self._content = {}
        retention.remove(self._snapshot.path)
        arguments = {
            worker: (self._ticket, *self._place_of(worker)) for worker in self._plan.remote
        }
        with contextlib.suppress(NotInitialized):
            ask_all(owner.discard, arguments, Deadline(_GIVE_UP_S))

    def _raise(self, what: str, failures: list[Any]) -> None:
        raise_first(what, failures, self._snapshot.directory, self._snapshot.step)
