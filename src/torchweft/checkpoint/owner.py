"""The functions that a driver calls by name on the owners of a state, to save or restore it.

Arguments and results are plain values and references, so that workers which unpickle nothing can
read them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchweft.checkpoint import background, files, parts, reading, retention, snapshots
from torchweft.checkpoint.parts import Options, Owned
from torchweft.checkpoint.plan import Places
from torchweft.checkpoint.reading import Found, Report, Source
from torchweft.checkpoint.staging import staged_parts
from torchweft.rpc import functions, rpc_sync

T = TypeVar("T")

# Saving


def capture(
    ticket: str, driver: int, items: Places, optimizers: Places, with_random: bool
) -> tuple[Any, ...]:
    """Copies and holds this worker's part of a state; returns its description for the driver."""
    taken = parts.take(_owned(items, optimizers), with_random=with_random)
    staged_parts().keep(ticket, driver, taken.content)
    return taken.kinds, taken.described, taken.options


@functions.async_execution
def write(
    ticket: str, directory: str, name: str, file: str
) -> torch.futures.Future[tuple[int, str]]:
    """Writes the held part to a file; answers with the size and hash of the file.

    That may take minutes, so it runs on a thread of its own while training continues.
    """
    content = staged_parts().take_out(ticket)
    path = snapshots.part_path(directory, name, file)

    def work() -> tuple[int, str]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        written = files.write_part(path, content)
        return written.size_bytes, written.sha256

    return _in_background(work)


def drop(ticket: str) -> None:
    """Drops a held part."""
    staged_parts().drop(ticket)


def discard(ticket: str, directory: str, name: str, file: str) -> None:
    """Drops a held part, and removes its file."""
    drop(ticket)
    path = snapshots.part_path(directory, name, file)
    files.remove_file(path)
    retention.remove_if_empty(os.path.dirname(path))


def tidy(directory: str, names: list[str]) -> None:
    """Removes all snapshots except ``names`` from a directory that is not shared."""
    retention.keep_only(directory, set(names))


# Restoring


def describe(items: Places, optimizers: Places) -> parts.Described:
    """Returns names and shapes of the parameters that this worker's optimizers step."""
    return parts.describe(_owned(items, optimizers))


@functions.async_execution
def prepare(
    ticket: str,
    driver: int,
    items: Places,
    optimizers: Places,
    directory: str,
    sources: list[Source],
    timeout_s: float,
) -> torch.futures.Future[Report]:
    """Reads the entries that this worker needs of a snapshot, compares them, and holds them.

    The worker's state is not changed. Answers with the problems that prevent restoring.
    """
    owned = _owned(items, optimizers)

    def work() -> Report:
        ask = asker(directory, timeout_s)
        content, report = reading.read_and_compare(owned, directory, sources, ask)
        staged_parts().keep(ticket, driver, content)
        return report

    return _in_background(work)


@functions.async_execution
def read(directory: str, source: Source) -> torch.futures.Future[Found]:
    """Reads entries of a file for a worker that cannot see the file."""
    return _in_background(lambda: reading.read_entries(directory, source))


def asker(directory: str, timeout_s: float) -> reading.Ask:
    """Returns a function that has another worker read a file in a directory."""

    def ask(worker: str, source: Source) -> Found:
        found: Found = rpc_sync(worker, read, (directory, source), timeout=timeout_s)
        return found

    return ask


def apply(
    ticket: str, items: Places, optimizers: Places, options: dict[str, Options], strict: bool
) -> None:
    """Puts the held entries in place."""
    owned = _owned(items, optimizers)
    parts.put(owned, staged_parts().take_out(ticket), options, strict=strict)


def _owned(items: Places, optimizers: Places) -> Owned:
    return Owned(
        {path: reference.local_value() for path, reference in items},
        {},
        {path: reference.local_value() for path, reference in optimizers},
    )


def _in_background(work: Callable[[], T]) -> torch.futures.Future[T]:
    # The process need not wait for it at exit: an unfinished file does not count.
    return background.start(work, "snapshot", is_awaited=False)
