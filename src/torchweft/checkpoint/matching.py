"""Matches a snapshot with a state: its entries, and the state of each parameter of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchweft.checkpoint.manifest import Manifest, Parameter
from torchweft.checkpoint.parts import Described
from torchweft.checkpoint.reading import Wanted


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


class Problems(NamedTuple):
    """The problems that prevent restoring a snapshot into a state."""

    missing: list[str]
    unexpected: list[str]
    differing: list[str]


def compare_paths(manifest: Manifest, paths: set[str], optimizers: set[str]) -> Problems:
    """Returns the entries that only the state or only the snapshot has, or whose types differ."""
    here = paths | optimizers
    saved = manifest.items.keys() | manifest.optimizers.keys()
    both = here & saved
    return Problems(
        sorted(here - saved),
        sorted(saved - here),
        [
            f"{path} is {_a(path in manifest.optimizers)} in the snapshot and "
            f"{_a(path in optimizers)} here"
            for path in sorted(both)
            if (path in manifest.optimizers) != (path in optimizers)
        ],
    )


def _a(is_optimizer: bool) -> str:
    return "a distributed optimizer" if is_optimizer else "something else"


def compare_parameters(
    path: str,
    saved: list[Parameter],
    groups: list[int],
    described: Mapping[int, tuple[str, tuple[int, ...]]],
) -> Problems:
    """Returns the problems that prevent restoring a distributed optimizer.

    Args:
        path: Its path in the state.
        saved: Its parameters in the snapshot.
        groups: The number of the group of each parameter in the state.
        described: Names and shapes of the parameters in the state, by their numbers.
    """
    by_name = {parameter.name: parameter for parameter in saved}
    problems = Problems([], [], [])
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
