"""Trains tables whose servers may be lost: opens them again, and goes on from the last snapshot."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, runtime_checkable

from torch import distributed

from torchweft.arguments import kind_of
from torchweft.checkpoint import parts
from torchweft.embedding.tables import Tables
from torchweft.errors import (
    ArgumentTypeError,
    ConfigurationError,
    SnapshotNotFound,
    WeftError,
    WorkerLost,
)
from torchweft.rpc import (
    WorkerState,
    barrier,
    get_worker_info,
    health,
    on_worker_lost,
)

_log = logging.getLogger("torchweft")
_NOTICE_S = 3.0
"""How long after an error the loss that has caused it may be noticed."""
_LOOK_S = 0.02

Opened = tuple[Any, ...]
"""Tables or a model with tables, the optimizer, and whatever else a step needs."""


@runtime_checkable
class Trained(Protocol):
    """A model with tables, all trainers of which call each method; ``HybridModel`` is one."""

    trainers: Any
    """Names of the trainers; the first one saves."""
    servers: Any
    """Names of the workers that have rows."""
    staleness: int | None
    """The bound of the collection; None for the asynchronous mode."""
    save: Callable[..., object]
    """Saves a snapshot after some steps."""
    restore: Callable[..., int]
    """Restores the last snapshot; returns its step."""
    close: Callable[[], None]
    """Releases the rows."""


class TrainedTables:
    """Tables without a model, whose methods all trainers call.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._is_first = get_worker_info().name == tables.trainers[0]
        self.trainers = tables.trainers
        self.servers = tuple(tables.servers)
        self.staleness = tables.bound
        self.close = tables.close

    def save(self, directory: str, **options: Any) -> None:
        """Has the first trainer save; the options are those of ``Tables.save``."""
        if self._is_first:
            self._tables.save(directory, **options)

    def restore(self, directory: str, *, state: dict[str, Any] | None = None) -> int:
        """Has the first trainer restore, and takes copies, learning rate and state from it.

        Raises:
            SnapshotNotFound: There is none.
            ConfigurationError: The first trainer could not restore.
        """
        own = {} if state is None else state
        tables = self._tables

        def restored() -> tuple[Any, ...] | None:
            try:
                step = tables.restore(directory, state=own).step
            except SnapshotNotFound:
                return None
            return step, tables.lr, tables.copied_values(), parts.take_local(own)

        told = tables.agreed(restored if self._is_first else None, "restore")
        if told is None:
            raise SnapshotNotFound(
                f"trainer {self.trainers[0]!r} has found no snapshot in {directory}",
                directory=directory,
            )
        step, lr, copies, values = told
        if not self._is_first:
            tables.take_over(lr, copies)
            parts.put_local(own, values)
        return int(step)


def recover(
    open: Callable[[], Opened],  # the word for it
    step: Callable[..., None],
    *,
    steps: int,
    directory: str | os.PathLike[str],
    every: int,
    state: Callable[..., dict[str, Any]] | None = None,
    keep: int | None = 2,
    attempts: int = 3,
    patience_s: float = 360.0,
) -> Opened:
    """Makes all steps of a training, also if servers are lost meanwhile. Blocks.

    It is for a ``HybridModel``, and for ``Tables`` that a program uses by itself. All trainers call
    it with equal arguments. After the loss of a server each closes the model and the process group,
    if there is one. It waits until the launcher has started the server again under its name, opens
    the model, and restores the last snapshot::

        def open_model():
            init_process_group(TRAINERS)
            model = HybridModel(build_model(), SERVERS)
            return model, model.optimizer(Adagrad(lr=0.1), make_dense)


        def make_step(step, model, optimizer):
            optimizer.zero_grad()
            loss_of(model, batches[step]).backward()
            optimizer.step()


        model, optimizer = recover(open_model, make_step, steps=1000, directory="runs/1", every=50)

    A program that starts again as a whole continues from the last snapshot, too. In the synchronous
    mode the result has the bits of a run without a loss, if steps depend on their number alone.

    Args:
        open: Makes the process group, if the program uses one, and the model. Returns a tuple:
            the ``HybridModel`` or the ``Tables`` first, whose optimizer is set.
        step: Makes one step; called with its number and what ``open`` has returned.
        steps: How many steps the whole training has.
        directory: Where snapshots are kept.
        every: Save after so many steps.
        state: Returns further state to be saved, given what ``open`` has returned; see
            ``torchweft.checkpoint.save``. It is that of the first trainer; after a loss
            the others take it over. With ``Tables``, the dense part belongs into it.
        keep: How many snapshots to keep; None for all.
        attempts: How many losses are recovered from.
        patience_s: How long to wait for a lost server to come back, and for the other trainers, in
            seconds. A trainer may wait in a collective of the program for another one that has
            noticed a loss before; it goes on when that one has left the process group.

    Returns:
        What ``open`` has returned last; the model is not closed.

    Raises:
        WorkerLost: A trainer is lost, a server did not come back in time, or there were too many
            losses.
        CallTimeout: Another trainer has not closed its model in time.
        ConfigurationError: There is a process group that ``open`` has not made, or a number
            cannot work.
        Exception: An error of ``open`` or ``step`` that no loss has caused. The model is closed.
    """
    for name, value in (("steps", steps), ("every", every), ("attempts", attempts)):
        if type(value) is not int or value < (1 if name == "every" else 0):
            raise ConfigurationError(f"{name} is {value!r}; pass a number")
    if distributed.is_initialized():
        raise ConfigurationError(
            "there is a process group already, and after a loss it has to be made again; make it "
            "in the function that opens the model"
        )
    # Its functions have the default group as a default argument. If DDP imported them after the
    # group was made, they would keep the group for good; see ``_close``.
    importlib.import_module("torch.distributed.nn")
    trainers: tuple[str, ...] = ()
    for attempt in itertools.count():
        opened: Opened = ()
        with _noting_losses() as lost:
            try:
                opened = _checked(open())
                trainers = opened[0].trainers
                _run(opened, step, steps, os.fspath(directory), every, state, keep)
                return opened
            except Exception as error:
                try:
                    causes = _causes(error, lost, opened)
                finally:
                    _close(opened, error)
                    opened = ()
                if attempt == attempts or not causes:
                    raise
                cause = next(iter(causes.values()))
                _log.warning("%s; restores the last snapshot when it is back", cause)
                _wait_for(causes, error, patience_s)
                if len(trainers) > 1:
                    barrier(trainers, timeout=patience_s)
    raise AssertionError


def _checked(opened: Any) -> Opened:
    if isinstance(opened, tuple) and opened and isinstance(opened[0], (Tables, Trained)):
        return opened
    raise ArgumentTypeError(
        f"the function that opens the model returned {kind_of(opened)}; it returns a tuple with "
        "the HybridModel or the Tables first"
    )


def _trained(opened: Opened) -> Trained:
    first: Any = TrainedTables(opened[0]) if isinstance(opened[0], Tables) else opened[0]
    trained: Trained = first
    return trained


def _run(
    opened: Opened,
    step: Callable[..., None],
    steps: int,
    directory: str,
    every: int,
    state: Callable[..., dict[str, Any]] | None,
    keep: int | None,
) -> None:
    model = _trained(opened)

    def more() -> dict[str, Any] | None:
        return None if state is None else state(*opened)

    try:
        done = model.restore(directory, state=more())
    except SnapshotNotFound:
        done = 0
    for number in range(done, steps):
        step(number, *opened)
        if (number + 1) % every == 0:
            _save(model, directory, number + 1, more(), keep)


def _save(
    model: Trained, directory: str, step: int, state: dict[str, Any] | None, keep: int | None
) -> None:
    if model.staleness == 0:  # The next step of the others waits for the first trainer.
        model.save(directory, step=step, state=state, keep=keep)
        return
    barrier(model.trainers)
    model.save(directory, step=step, state=state, keep=keep)
    barrier(model.trainers)


@contextmanager
def _noting_losses() -> Iterator[dict[str, WorkerLost]]:
    """Notes the workers that are lost while a block runs."""
    lost: dict[str, WorkerLost] = {}

    def note(error: WorkerLost) -> None:
        lost.setdefault(error.worker, error)

    forget = on_worker_lost(note)
    try:
        yield lost
    finally:
        forget()


def _causes(error: Exception, lost: dict[str, WorkerLost], opened: Opened) -> dict[str, WorkerLost]:
    """Returns the lost servers that may have caused an error.

    Raises:
        WorkerLost: A trainer is lost.
    """
    if isinstance(error, WorkerLost):
        lost.setdefault(error.worker, error)
    model = _trained(opened) if opened else None
    servers = None if model is None else set(model.servers)
    trainers = () if model is None else model.trainers
    deadline_s = time.monotonic() + _NOTICE_S
    # DDP raises a RuntimeError where another trainer, which has noticed the loss, has left.
    while isinstance(error, (WeftError, RuntimeError)) and time.monotonic() < deadline_s:
        for name in trainers:
            if name in lost:
                raise lost[name] from error
        found = {name: each for name, each in lost.items() if servers is None or name in servers}
        if found:
            return found
        time.sleep(_LOOK_S)
    return {}


def _close(opened: Opened, error: Exception) -> None:
    """Closes the model and the process group."""
    if opened:
        with suppress(WeftError):  # A server is lost; the others have released the rows.
            opened[0].close()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    # The connections of gloo end with the last reference to the group, and no earlier. Trainers
    # that wait in a collective notice that, before its timeout. Frames of the error have some.
    traceback.clear_frames(error.__traceback__)
    gc.collect()


def _wait_for(lost: dict[str, WorkerLost], error: Exception, patience_s: float) -> None:
    """Waits until lost workers have come back under their names.

    Raises:
        WorkerLost: One did not come back in time.
    """
    deadline_s = time.monotonic() + patience_s
    for name, cause in lost.items():
        while not is_there(name):
            if time.monotonic() > deadline_s:
                raise cause from error
            time.sleep(_LOOK_S)


def is_there(name: str) -> bool:
    """Whether a worker has a name now, perhaps in place of a lost one."""
    return any(each.worker.name == name and each.state is not WorkerState.LOST for each in health())
