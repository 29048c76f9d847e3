"""Compares a snapshot with a state, and reads the entries that each worker needs of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torchweft.checkpoint import files, kinds, snapshots
from torchweft.checkpoint.files import Written
from torchweft.checkpoint.kinds import (
    TENSOR,
    VALUE,
    Differences,
    HostCopier,
    in_base_form,
    is_plain,
)
from torchweft.checkpoint.parts import Content, Described, Owned
from torchweft.checkpoint.plan import SEPARATOR, Leaf
from torchweft.checkpoint.snapshots import Manifest, Parameter
from torchweft.optim.states import fits_class

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
        if path in values:  # Others are within an entry that has grown.
            _compare(path, found_kinds[path], values[path], item, report)
    return content, report


_REPORTED = ("lacking", "corrupt", "missing", "unexpected", "differing")


def _compare(path: str, kind: str, value: Any, item: Any, report: Report) -> None:
    if kind == VALUE and item["kind"] == TENSOR:
        return  # It takes the place of the plain value.
    if item["kind"] != kind:
        report["differing"].append(f"{path} is a {item['kind']} in the snapshot and a {kind} here")
        return
    found = kinds.differences(path, kind, value, item["state"])
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
    """Returns copies of the wanted entries of a file, if this worker can see the file.

    Raises:
        CheckpointError: This worker sees the file, but may not read it.
    """
    name, file, size_bytes, sha256, wanted, _ = source
    path = snapshots.part_path(directory, name, file)
    try:
        if problem := files.difference(path, Written(size_bytes, sha256)):
            return CORRUPT, problem
        part = files.read_part(path)
    except FileNotFoundError:
        return LACKING, None
    except PermissionError as error:
        raise snapshots.not_permitted(directory, path) from error
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


# The manifest and the state


class Needs:
    """The data that one worker needs of a snapshot, by the name of the worker that wrote it."""

    def __init__(self) -> None:
        self.by_writer: dict[str, Wanted] = {}

    def item(self, writer: str, path: str) -> None:
        """Adds an entry."""
        self._of(writer)[0].append(path)

    def parameter(self, writer: str, path: str, name: str, number: int) -> None:
        """Adds the state of a parameter of an optimizer; ``number`` is its present number."""
        self._of(writer)[1].setdefault(path, {})[name] = number

    def random(self, writer: str) -> None:
        """Adds the random number generators."""
        items, optimizers, _ = self._of(writer)
        self.by_writer[writer] = items, optimizers, True

    def _of(self, writer: str) -> Wanted:
        return self.by_writer.setdefault(writer, ([], {}, False))


def grown_entries(manifest: Manifest, values: Mapping[str, Leaf]) -> dict[str, list[str]]:
    """Returns the plain entries of a state that had tensors in them when they were saved.

    A list to which a program appends tensors is such an entry, or a value that was None at first.
    Its content was saved as entries of their own, see ``plan.leaves``.

    Args:
        manifest: The snapshot.
        values: The entries of the state that are neither references nor optimizers.

    Returns:
        The paths of the saved entries, by the path of the entry of the state.
    """
    own = {
        path: item
        for path, item in manifest.items.items()
        if item.worker == manifest.driver and item.kind in (TENSOR, VALUE)
    }
    found: dict[str, list[str]] = {}
    if manifest.lists is None:
        return found  # A former Weft has written it, and no path tells a list from a dict.
    for path, leaf in values.items():
        if path not in manifest.items and is_plain(in_base_form(leaf.value)):
            inner = [each for each in manifest.items if each.startswith(path + SEPARATOR)]
            if inner and own.keys() >= set(inner):
                found[path] = inner
    return found


def assembled(path: str, states: Mapping[str, Any], lists: Collection[str]) -> Any:
    """Returns a dict or list whose entries were saved apart.

    Args:
        path: Its path.
        states: The entries in order, by their paths within it.
        lists: The paths of lists; others are those of dicts.
    """
    groups: dict[str, dict[str, Any]] = {}
    for within, state in states.items():
        key, _, rest = within.partition(SEPARATOR)
        groups.setdefault(key, {})[rest] = state
    made = {
        key: group[""] if "" in group else assembled(path + SEPARATOR + key, group, lists)
        for key, group in groups.items()
    }
    return list(made.values()) if path in lists else made


def compare_paths(manifest: Manifest, paths: set[str], optimizers: set[str]) -> Differences:
    """Returns the entries that only the state or only the snapshot has, or whose types differ."""
    here = paths | optimizers
    saved = manifest.items.keys() | manifest.optimizers.keys()
    both = here & saved
    return Differences(
        sorted(here - saved),
        sorted(saved - here),
        [
            f"{path} is {_a(path in manifest.optimizers)} in the snapshot and "
            f"{_a(path in optimizers)} here"
            for path in sorted(both)
            if (path in manifest.optimizers) != (path in optimizers)
        ],
    )


def compare_classes(manifest: Manifest, classes: Mapping[str, list[str]]) -> list[str]:
    """Returns the optimizers whose class has no use for the state of the saved one.

    The state of one class fits another one only if one of them derives from the other. ``torch``
    loads any state, and fails in the next step.

    Args:
        manifest: The snapshot.
        classes: The names of each optimizer's class and its bases in the state, by path.
    """
    saved = manifest.classes or {}
    return [
        f"{path} is of the class {saved[path][0]} in the snapshot and {classes[path][0]} here"
        for path in sorted(saved.keys() & classes.keys())
        if not fits_class(saved[path], classes[path])
    ]


def _a(is_optimizer: bool) -> str:
    return "a distributed optimizer" if is_optimizer else "something else"


def compare_parameters(
    path: str,
    saved: list[Parameter],
    groups: list[int],
    described: Mapping[int, tuple[str, tuple[int, ...]]],
) -> Differences:
    """Returns the problems that prevent restoring a distributed optimizer.

    Args:
        path: Its path in the state.
        saved: Its parameters in the snapshot.
        groups: The number of the group of each parameter in the state.
        described: Names and shapes of the parameters in the state, by their numbers.
    """
    by_name = {parameter.name: parameter for parameter in saved}
    problems = Differences([], [], [])
    saved_groups = 1 + max(parameter.group for parameter in saved)
    if saved_groups != 1 + max(groups):
        problems.differing.append(
            f"{path} has {saved_groups} parameter groups in the snapshot and {1 + max(groups)} here"
        )
        return problems
    seen = set()
    for number, (name, shape) in sorted(described.items()):
        seen.add(name)
        parameter = by_name.get(name)
        if parameter is None:
            problems.missing.append(f"{path}: parameter {name}")
        elif parameter.shape != shape:
            problems.differing.append(
                f"{path}: parameter {name} has shape {parameter.shape} in the snapshot and {shape} "
                "here"
            )
        elif parameter.group != groups[number]:
            problems.differing.append(
                f"{path}: parameter {name} is in group {parameter.group} in the snapshot and in "
                f"group {groups[number]} here"
            )
    problems.unexpected.extend(f"{path}: parameter {name}" for name in by_name if name not in seen)
    return problems


def assign_parameters(
    path: str, saved: list[Parameter], described: Described, needs: Needs
) -> None:
    """Adds to ``needs`` which writer has the state of each parameter that one worker has now."""
    by_name = {parameter.name: parameter for parameter in saved}
    for number, (name, _) in described.get(path, {}).items():
        if name in by_name:
            needs.parameter(by_name[name].worker, path, name, number)
