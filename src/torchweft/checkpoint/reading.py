"""Reads a snapshot for one worker, also through other workers, and compares it with the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchweft.checkpoint import adapters, files, snapshots
from torchweft.checkpoint.files import Written
from torchweft.checkpoint.parts import Content, Owned
from torchweft.checkpoint.plain import HostCopier

Wanted = tuple[list[str], dict[str, dict[str, int]], bool]
"""The paths of entries; for each optimizer its parameters, by name in the snapshot, with their
number on the restoring worker; and whether random number generators are wanted."""

Source = tuple[str, str, int, str, Wanted, list[str]]
"""The name of a snapshot; the name, size and hash of a file in it; the wanted entries; and the
names of the workers to ask if this worker cannot see the file."""

Ask = Callable[[str, Source], "Found"]
"""Has another worker read a file."""

Report = dict[str, list[Any]]
"""The problems that prevent restoring: ``lacking`` files, ``corrupt`` files with a description, and
``missing``, ``unexpected`` and ``differing`` entries."""


Found = tuple[str, Any]
"""The outcome of reading a file: ``FOUND`` and its entries, ``CORRUPT`` and why, or ``LACKING``."""

FOUND, CORRUPT, LACKING = "found", "corrupt", "lacking"


def read_and_compare(
    owned: Owned, directory: str, sources: list[Source], ask: Ask
) -> tuple[Content, Report]:
    """Returns all entries that a worker needs of a snapshot, and the problems with restoring them.

    Args:
        owned: The entries that the worker owns.
        directory: Where the snapshots are.
        sources: The files, and the wanted entries of each.
        ask: Asks another worker, by name, to read a file.
    """
    content: Content = {"items": {}, "optimizers": {}, "random": None}
    report: Report = {name: [] for name in _REPORTED}
    for source in sources:
        outcome, found = _read_anywhere(directory, source, ask)
        if outcome == FOUND:
            _merge(content, found)
        elif outcome == LACKING:
            report[LACKING].append(source[1])
        else:
            report[CORRUPT].append((source[1], found))
    values, found_kinds = owned.values(), owned.kinds()
    for path, item in content["items"].items():
        _compare(path, found_kinds[path], values[path], item, report)
    return content, report


_REPORTED = ("lacking", "corrupt", "missing", "unexpected", "differing")


def _compare(path: str, kind: str, value: Any, item: Any, report: Report) -> None:
    if item["kind"] != kind:
        report["differing"].append(f"{path} is a {item['kind']} in the snapshot and a {kind} here")
        return
    found = adapters.differences(path, kind, value, item["state"])
    report["missing"] += found.missing
    report["unexpected"] += found.unexpected
    report["differing"] += found.differing


def _merge(content: Content, found: Content) -> None:
    content["items"].update(found["items"])
    for path, state in found["optimizers"].items():
        content["optimizers"].setdefault(path, {}).update(state)
    if found["random"] is not None:
        content["random"] = found["random"]
    if "options" in found:
        content["options"] = found["options"]


def _read_anywhere(directory: str, source: Source, ask: Ask) -> Found:
    found = read_entries(directory, source)
    for worker in source[5]:
        if found[0] != LACKING:
            break
        found = ask(worker, source)
    return found


def read_entries(directory: str, source: Source) -> Found:
    """Returns copies of the wanted entries of a file, if this worker can see the file."""
    name, file, size_bytes, sha256, wanted, _ = source
    path = snapshots.part_path(directory, name, file)
    try:
        if problem := files.difference(path, Written(size_bytes, sha256)):
            return CORRUPT, problem
        part = files.read_part(path)
    except FileNotFoundError:
        return LACKING, None
    except OSError as error:
        return CORRUPT, f"it cannot be read: {error}"
    # A copy does not need the mapped file any more.
    return FOUND, HostCopier(path).copy(_extract(part, wanted))


def _extract(part: Content, wanted: Wanted) -> Content:
    items, optimizers, with_random = wanted
    extracted: Content = {
        "items": {path: part["items"][path] for path in items},
        "optimizers": {
            path: _renumbered(part["optimizers"][path], numbers)
            for path, numbers in optimizers.items()
        },
        "random": part["random"] if with_random else None,
    }
    if "options" in part:
        extracted["options"] = part["options"]
    return extracted


def _renumbered(saved: Content, numbers: dict[str, int]) -> Content:
    own = {
        number: saved["state"][name] for name, number in numbers.items() if name in saved["state"]
    }
    return {**saved["shared"], **own}
