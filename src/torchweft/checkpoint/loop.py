"""A training loop that resumes from the last snapshot, and saves snapshots at intervals."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from torchweft.checkpoint import snapshots
from torchweft.checkpoint.gate import StepGate
from torchweft.checkpoint.restoring import restore
from torchweft.checkpoint.saving import Workers, check_keep, save_async
from torchweft.checkpoint.snapshots import Snapshot
from torchweft.errors import ConfigurationError, SnapshotCorrupt
from torchweft.rpc import UNSET_RPC_TIMEOUT, is_notice_given

_log = logging.getLogger("torchweft")
RESTART_COUNT = "WEFT_RESTART_COUNT"
"""How often a supervisor has restarted this program; for the message."""

GIVEN_UP_STATUS = 75
"""Exit status of a program that has saved a snapshot to be started again (``EX_TEMPFAIL``)."""


class resumable:
    """Yields the remaining steps of a training, after restoring the last snapshot if there is one.

    Snapshots are saved at intervals between two steps, and a last one when all steps are done. An
    error in a step is raised unchanged: a ``WorkerLost`` ends the program, a supervisor
    (``torchweft run --restarts``) restarts it, and the program reaches this line again and
    resumes::

        state = {"model": model, "optimizer": optimizer, "losses": []}
        for step in torchweft.checkpoint.resumable(10_000, "runs/1", state, every=100):
            loss = train_one_step(batches[step])
            state["losses"].append(loss)

    Leaving the loop by ``break`` saves nothing, and the steps cannot be iterated over again. The
    launcher may have notice that this host will be given up, as when SLURM pre-empts a job. Then
    the current step is finished and saved, and the program ends by ``SystemExit`` with status 75,
    for the launcher to start it again.

    Args:
        steps: How many steps the whole training has.
        directory: Where snapshots are kept; see ``save``.
        state: The state to save and restore; see ``save``.
        every: Save after so many steps.
        every_s: Save when so many seconds have passed since the last save.
        keep: How many snapshots to keep; None for all.
        in_background: Whether training continues while a snapshot is written; see ``save_async``.
        fall_back: Whether to resume from the newest undamaged snapshot, with a warning, if the
            last one is damaged; from step 0 if all are.
        gate: See ``save``.
        random_states: See ``save``; saved generators are restored unless this is False.
        timeout: Seconds that each save and restore may take.

    Attributes:
        snapshot: The last snapshot: at first the restored snapshot, or None if there was none.
        first_step: The first remaining step.

    Raises:
        ConfigurationError: Neither ``every`` nor ``every_s`` is given, or a number is invalid.
        CheckpointError: The last snapshot cannot be restored; see ``restore``.
    """

    def __init__(
        self,
        steps: int,
        directory: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        every: int | None = None,
        every_s: float | None = None,
        keep: int | None = 2,
        in_background: bool = False,
        fall_back: bool = False,
        gate: StepGate | None = None,
        random_states: Workers = True,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> None:
        if not isinstance(steps, int) or steps < 0:
            raise ConfigurationError(f"steps is {steps!r}; pass how many the whole training has")
        if every is None and every_s is None:
            raise ConfigurationError(
                "say when to save: every=100 for every hundred steps, every_s=600 for every ten "
                "minutes"
            )
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ConfigurationError(f"every is {every!r}; pass a number of steps, at least 1")
        if every_s is not None and not every_s > 0:
            raise ConfigurationError(f"every_s is {every_s!r}; pass a number of seconds above 0")
        check_keep(keep)
        self._steps = steps
        self._directory = snapshots.absolute(directory)
        self._state = state
        self._every = every
        self._every_s = every_s
        self._in_background = in_background
        self._saving: dict[str, Any] = {
            "keep": keep,
            "gate": gate,
            "random_states": random_states,
            "timeout": timeout,
        }
        self._pending: torch.futures.Future[Snapshot] | None = None
        self._has_begun = False
        self.snapshot = self._restore(fall_back)
        self.first_step = 0 if self.snapshot is None else self.snapshot.step
        self._saved_step = self.first_step if self.snapshot else -1
        self._saved_s = time.monotonic()

    def _restore(self, is_lenient: bool) -> Snapshot | None:
        timeout, has_random = self._saving["timeout"], self._saving["random_states"] is not False
        for snapshot in reversed(snapshots.list_snapshots(self._directory)):
            try:
                restore(snapshot, self._state, random_states=has_random, timeout=timeout)
            except SnapshotCorrupt as error:
                if not is_lenient:
                    raise
                _log.warning("%s", str(error))
                continue
            count = os.environ.get(RESTART_COUNT, "0")
            again = f", restart {count}" if count != "0" else ""
            _log.info("goes on from step %d, snapshot %s%s", snapshot.step, snapshot.path, again)
            return snapshot
        return None

    def __iter__(self) -> Iterator[int]:
        """Yields the numbers of the steps; a request for the next step completes a step.

        Raises:
            ConfigurationError: The steps have been begun before: the state is not that of the first
                of them any more.
        """
        if self._has_begun:
            raise ConfigurationError(
                f"the steps from {self.first_step} on were begun before, and would be done again "
                "on a state that has them; make the state anew and call resumable again"
            )
        self._has_begun = True
        for step in range(self.first_step, self._steps):
            yield step
            self._raise_earlier()
            is_given_up = is_notice_given()
            if is_given_up or self._is_due(step + 1):
                self._begin_save(step + 1)
            if is_given_up and step + 1 < self._steps:
                self._give_up(step + 1)
        if self._saved_step < self._steps:
            self._begin_save(self._steps)
        self._await_save()

    def _give_up(self, done: int) -> None:
        """Ends the program, which has saved its state, so that its launcher starts it again."""
        self._await_save()
        assert self.snapshot is not None
        _log.warning("saved step %d in %s, as this host is given up", done, self.snapshot.path)
        raise SystemExit(GIVEN_UP_STATUS)

    def _is_due(self, done: int) -> bool:
        if done == self._steps:
            return False  # The final save follows at once.
        if self._every is not None and done % self._every == 0:
            return True
        return self._every_s is not None and time.monotonic() - self._saved_s >= self._every_s

    def _begin_save(self, done: int) -> None:
        self._await_save()
        self._pending = save_async(self._directory, self._state, step=done, **self._saving)
        self._saved_step = done
        self._saved_s = time.monotonic()
        if not self._in_background:
            self._await_save()

    def _raise_earlier(self) -> None:
        """Raises the error of a failed background save, as soon as the error is known."""
        if self._pending is not None and self._pending.done():
            self._await_save()

    def _await_save(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self.snapshot = pending.wait()
