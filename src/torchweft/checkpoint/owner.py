"""The owners of a state: the functions that a driver calls by name there, within one deadline.

Arguments and results are plain values and references, so that workers which unpickle nothing can
read them.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchweft import knobs
from torchweft.arguments import limit_of
from torchweft.checkpoint import files, parts, reading, snapshots
from torchweft.checkpoint.parts import Options, Owned, staged_parts
from torchweft.checkpoint.plan import Places
from torchweft.checkpoint.reading import Found, Report, Source
from torchweft.engine.worker.current import current
from torchweft.errors import CallTimeout, CheckpointError, WeftError, WorkerLost
from torchweft.optim.distributed import Failure, described, name_of
from torchweft.rpc import functions, rpc_sync
from torchweft.rpc.current_call import caller
from torchweft.rpc.futures import OrderedFuture, fail

T = TypeVar("T")

# The driver's calls


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
        f"{what} failed {described([first, *others])}",
        directory=directory,
        step=step,
        worker=name_of(first.owner),
    ) from first.error


def _urgency(error: Exception) -> int:
    if isinstance(error, WorkerLost):
        return 0
    if isinstance(error, CallTimeout):
        return 1
    return 2 if isinstance(error, WeftError) else 3


# Saving


def capture(ticket: str, items: Places, optimizers: Places, with_random: bool) -> tuple[Any, ...]:
    """Copies this worker's part of a state and holds it for the caller, the driver.

    Returns its description.
    """
    taken = parts.take(_owned(items, optimizers), with_random=with_random)
    staged_parts().keep(ticket, caller(), taken.content)
    return taken.kinds, taken.described, taken.options


@functions.async_execution
def write(
    ticket: str, directory: str, name: str, file: str
) -> torch.futures.Future[tuple[int, str]]:
    """Writes the held part to a file; answers with the size and hash of the file.

    That may take minutes, so it runs on a thread of its own while training continues.
    """
    content = staged_parts().take_out(ticket, caller())
    path = snapshots.part_path(directory, name, file)

    def work() -> tuple[int, str]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        written = files.write_part(path, content)
        return written.size_bytes, written.sha256

    return in_background(work)


def drop(ticket: str) -> None:
    """Drops a part that is held for the caller."""
    staged_parts().drop(ticket, caller())


def discard(ticket: str, directory: str, name: str, file: str) -> None:
    """Drops a held part, and removes its file."""
    drop(ticket)
    path = snapshots.part_path(directory, name, file)
    files.remove_file(path)
    snapshots.remove_if_empty(os.path.dirname(path))


def tidy(directory: str, names: list[str]) -> None:
    """Removes all snapshots except ``names`` from a directory that is not shared."""
    snapshots.keep_only(directory, set(names))


# Restoring


def describe(items: Places, optimizers: Places) -> parts.Described:
    """Returns names and shapes of the parameters that this worker's optimizers step."""
    return parts.describe(_owned(items, optimizers))


@functions.async_execution
def prepare(
    ticket: str,
    items: Places,
    optimizers: Places,
    directory: str,
    sources: list[Source],
    timeout_s: float,
) -> torch.futures.Future[Report]:
    """Reads the entries that this worker needs of a snapshot, compares them, and holds them.

    The worker's state is not changed. Answers with the problems that prevent restoring.
    """
    owned, driver = _owned(items, optimizers), caller()

    def work() -> Report:
        ask_other = functools.partial(ask, directory, timeout_s)
        content, report = reading.read_and_compare(owned, directory, sources, ask_other)
        staged_parts().keep(ticket, driver, content)
        return report

    return in_background(work)


@functions.async_execution
def read(directory: str, source: Source) -> torch.futures.Future[Found]:
    """Reads entries of a file for a worker that cannot see the file."""
    return in_background(lambda: reading.read_entries(directory, source))


def ask(directory: str, timeout_s: float, worker: str, source: Source) -> Found:
    """Has another worker read a file in a directory."""
    found: Found = rpc_sync(worker, read, (directory, source), timeout=timeout_s)
    return found


def apply(
    ticket: str, items: Places, optimizers: Places, options: dict[str, Options], strict: bool
) -> None:
    """Puts the held entries in place."""
    owned = _owned(items, optimizers)
    parts.put(owned, staged_parts().take_out(ticket, caller()), options, strict=strict)


def _owned(items: Places, optimizers: Places) -> Owned:
    return Owned(
        {path: reference.local_value() for path, reference in items},
        {},
        {path: reference.local_value() for path, reference in optimizers},
    )


def in_background(
    work: Callable[[], T], name: str = "snapshot", *, is_awaited: bool = False
) -> torch.futures.Future[T]:
    """Runs a function on a thread of its own; returns a future of its result.

    Args:
        work: The function to run.
        name: The name of the thread, appended to the name of the worker.
        is_awaited: Whether the process waits for the thread when it ends. It need not wait for a
            part: an unfinished file does not count.
    """
    future: OrderedFuture[T] = OrderedFuture()

    def complete() -> None:
        try:
            result = work()
        except BaseException as error:
            fail(future, error)
        else:
            future.set_result(result)

    run = current().served_streams.carried(complete)

    thread = threading.Thread(
        target=run, name=f"weft-{current().info.name}-{name}", daemon=not is_awaited
    )
    thread.start()
    return future
