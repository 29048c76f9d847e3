"""The owners of a state: the functions that a driver calls there.

Arguments and results are plain values and references, so that workers which unpickle nothing can
read them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch

from torchweft.checkpoint import dcp, files, kinds, parts, snapshots
from torchweft.checkpoint.encoding import Part
from torchweft.checkpoint.files import Written
from torchweft.checkpoint.kinds import OPTIMIZER, PARAMETER, Content, Differences
from torchweft.checkpoint.parts import Options, OwnedState, Places
from torchweft.checkpoint.snapshots import Manifest, read_manifest
from torchweft.errors import CheckpointError, NotInitialized
from torchweft.extending import (
    caller,
    check_types,
    run_on_owners,
    served_streams,
    this_worker,
)
from torchweft.optim import DistributedOptimizer
from torchweft.rpc import OrderedFuture, RRef, functions, rpc_sync

T = TypeVar("T")
GIVE_UP_S = 5.0
"""How long cleaning up after a failure may take."""


class HeldPart(Generic[T]):
    """What this worker holds for a driver between two of its calls: a part, or what is prepared.

    The driver has a reference to it. So it is also dropped when the driver gives up the call that
    would have returned it, or is lost.

    Args:
        driver: The id of the driver.
        held: The part, or what is prepared.
    """

    def __init__(self, driver: int, held: T) -> None:
        self._driver = driver
        self._held: T | None = held

    def look(self) -> T:
        """Returns what is held.

        Raises:
            CheckpointError: It is held no more.
        """
        if self._held is None:
            raise CheckpointError(
                f"worker {this_worker().name!r} has written this part, or put it in place, before"
            )
        return self._held

    def take_out(self) -> T:
        """Returns what is held, and stops holding it.

        Raises:
            CheckpointError: It is held no more, or for another driver.
        """
        if self._driver != caller().id:
            raise CheckpointError(
                f"worker {this_worker().name!r} holds nothing for worker {caller().name!r} there"
            )
        held, self._held = self.look(), None
        return held


def drop(part: RRef[HeldPart[Any]]) -> None:
    """Drops a part that is held for the caller."""
    with contextlib.suppress(CheckpointError):
        _held(part).take_out()


def drop_parts(held: dict[int, RRef[HeldPart[Any]]]) -> None:
    """Has workers drop parts, which are by the ids of the workers, and drops the references.

    The references alone would not do: an error that the program keeps may refer to them.
    """
    with contextlib.suppress(NotInitialized):
        arguments = {worker: (part,) for worker, part in held.items()}
        run_on_owners(drop, arguments, timeout_s=lambda: GIVE_UP_S)
    held.clear()


def _held(reference: RRef[HeldPart[T]]) -> HeldPart[T]:
    part = reference.local_value()
    check_types(part=(part, HeldPart))
    return part


# Saving


def capture(
    places: Places, with_random: bool
) -> tuple[dict[str, str], dict[str, Options], RRef[HeldPart[Part]]]:
    """Copies this worker's part of a state.

    Returns:
        The kind of each entry by path, the hyper-parameters, and a reference to the part.
    """
    owned = OwnedState.of(places)
    owned.check_whole()
    part, options = parts.take(owned, with_random=with_random)
    return part.kinds(), options, RRef(HeldPart(caller().id, part))


@functions.async_execution
def write(
    part: RRef[HeldPart[Part]], directory: str, name: str, file: str
) -> torch.futures.Future[tuple[int, str]]:
    """Writes a held part to a file; answers with the size and hash of the file.

    That may take minutes, so it runs on a thread of its own while training continues.
    """
    path = snapshots.part_path(directory, name, file)
    taken = _held(part).take_out()

    def work() -> tuple[int, str]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        written = files.write_part(path, taken)
        return written.size_bytes, written.sha256

    return in_background(work)


def discard(directory: str, name: str, file: str) -> None:
    """Removes the file of a part."""
    path = snapshots.part_path(directory, name, file)
    files.remove_file(path)
    snapshots.remove_if_empty(os.path.dirname(path))


def tidy(directory: str, names: list[str]) -> None:
    """Removes all snapshots except ``names`` from a directory that is not shared."""
    snapshots.keep_only(directory, set(names))


# Restoring

Origin = tuple[bytes, str, str, dict[str, RRef[HeldPart[Part]]], list[str], bool]
"""Where a state comes from: the manifest; the directory, and the name of the snapshot in it; or the
parts that workers hold, by the name of the worker; the names of the workers of the group, the
driver's first; and whether random number generators are restored."""

Prepared = tuple[OwnedState, Content]
"""The entries that a worker owns, and what they are to become."""

Found = tuple[str, Any]
"""The outcome of reading a file: ``FOUND`` and its entries, ``CORRUPT`` and why, or ``LACKING``."""

FOUND, CORRUPT, LACKING = "found", "corrupt", "lacking"

Report = dict[str, list[Any]]
"""The problems that prevent restoring: ``lacking`` files, ``corrupt`` files with a description, and
``missing``, ``unexpected`` and ``differing`` entries; the paths of this worker's ``parameters``."""


@functions.async_execution
def prepare(
    places: Places, origin: Origin, timeout_s: float
) -> torch.futures.Future[tuple[Report, RRef[HeldPart[Prepared]]]]:
    """Reads the entries that this worker needs, compares them, and holds them.

    The worker's state is not changed. Answers with the problems that prevent restoring.
    """
    owned, driver = OwnedState.of(places), caller().id

    def work() -> tuple[Report, RRef[HeldPart[Prepared]]]:
        content, report = read_and_compare(owned, {}, origin, timeout_s)
        return report, RRef(HeldPart(driver, (owned, content)))

    return in_background(work)


def apply(prepared: RRef[HeldPart[Prepared]], options: dict[str, Options], strict: bool) -> None:
    """Puts the entries that were prepared in place."""
    owned, content = _held(prepared).take_out()
    parts.put(owned, content, options, strict=strict)


@functions.async_execution
def read(
    directory: str, name: str, file: tuple[str, int, str], wanted: list[str]
) -> torch.futures.Future[Found]:
    """Reads entries of a file for a worker that cannot see the file."""
    return in_background(lambda: read_entries(directory, name, file, wanted))


def read_held(part: RRef[HeldPart[Part]], wanted: list[str]) -> Content:
    """Returns entries of a part that this worker holds, to a worker that needs them."""
    return _held(part).look().content(wanted)


def read_and_compare(
    owned: OwnedState,
    distributed: Mapping[str, DistributedOptimizer],
    origin: Origin,
    timeout_s: float,
) -> tuple[Content, Report]:
    """Returns all entries that this worker needs, and the problems with restoring them.

    Args:
        owned: The entries that the worker owns.
        distributed: The distributed optimizers of the state, at the driver.
        origin: Where the entries are.
        timeout_s: The limit of each call of another worker.
    """
    owned.check_whole()
    manifest = read_manifest(origin[0])
    values = {**owned.values(), **distributed}
    kinds_here = {**owned.kinds(), **dict.fromkeys(distributed, OPTIMIZER)}
    stepped: dict[str, str] = {}
    for path, parameters in owned.parameters().items():
        if path in manifest.items:  # Else the driver says that the optimizer is missing.
            values.update((each.path, each) for each in parameters.values())
            stepped.update(
                (each.path, parts.shown(each.path, path)) for each in parameters.values()
            )
    kinds_here.update(dict.fromkeys(stepped, PARAMETER))
    wanted = values.keys() & manifest.items.keys()
    random = parts.random_path(this_worker().name)
    if origin[5] and random in manifest.items:
        wanted |= {random}
    content, report = _read_all(manifest, origin, wanted, timeout_s)
    missing = [text for path, text in stepped.items() if path not in manifest.items]
    problems = Differences(missing, [], [])
    for path, item in content.items():
        if path != random:
            name = stepped.get(path, path)
            problems.add(kinds.differences(name, kinds_here[path], values[path], item))
    return content, {**report, **problems._asdict(), "parameters": list(stepped)}


def _read_all(
    manifest: Manifest, origin: Origin, wanted: Iterable[str], timeout_s: float
) -> tuple[Content, Report]:
    """Returns the wanted entries, and the files that could not be read."""
    by_writer: dict[str, list[str]] = {}
    for path in sorted(wanted):
        by_writer.setdefault(manifest.items[path].worker, []).append(path)
    content: Content = {}
    report: Report = {LACKING: [], CORRUPT: []}
    for writer, paths in by_writer.items():
        file, (outcome, found) = _read_anywhere(manifest, origin, writer, paths, timeout_s)
        if outcome == FOUND:
            content.update(found)
        else:
            report[outcome].append((file, found))
    return content, report


def _read_anywhere(
    manifest: Manifest, origin: Origin, writer: str, wanted: list[str], timeout_s: float
) -> tuple[str, Found]:
    """Returns the name of the file of a writer, and the wanted entries of it."""
    _, directory, name, held, group, _ = origin
    if writer in held:
        part = held[writer]
        if part.is_owner():
            return "", (FOUND, read_held(part, wanted))
        owner = parts.owner_of(part)
        return "", (FOUND, _ask(owner, read_held, (part, wanted), timeout_s))
    record = manifest.part_of(writer)
    place = directory, name, (record.file, record.size_bytes, record.sha256), wanted
    found = read_entries(*place)
    for worker in dict.fromkeys([writer, group[0]]):
        is_other = worker in group and worker != this_worker().name
        if found[0] == LACKING and is_other:
            found = _ask(worker, read, place, timeout_s)
    return record.file, found


def _ask(worker: Any, function: Any, given: tuple[Any, ...], timeout_s: float) -> Any:
    return rpc_sync(worker, function, given, timeout=timeout_s)


def read_entries(directory: str, name: str, file: tuple[str, int, str], wanted: list[str]) -> Found:
    """Returns copies of the wanted entries of a file, if this worker can see the file.

    Args:
        directory: Where the snapshots are.
        name: The name of the snapshot.
        file: The name, size and hash of the file.
        wanted: The entries.

    Raises:
        CheckpointError: This worker sees the file, but may not read it.
    """
    if file[0] == dcp.METADATA:
        path = os.path.join(directory, name)
    else:
        path = snapshots.part_path(directory, name, file[0])
    try:
        if file[0] == dcp.METADATA:
            return FOUND, dcp.read_part(path, file[2], wanted)
        if problem := files.difference(path, Written(*file[1:])):
            return CORRUPT, problem
        return FOUND, files.read_part(path, wanted)
    except FileNotFoundError:
        return LACKING, None
    except PermissionError as error:
        raise snapshots.not_permitted(directory, path) from error
    except (OSError, ValueError) as error:
        return CORRUPT, f"it cannot be read: {error}"


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
            future.set_exception(error)
        else:
            future.set_result(result)

    run = served_streams().carried(complete)
    threading.Thread(
        target=run, name=f"weft-{this_worker().name}-{name}", daemon=not is_awaited
    ).start()
    return future
