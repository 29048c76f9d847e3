"""The parameter groups of a pipeline, from those of the optimizers of its workers.

Each worker's optimizer is made of its own weights, so a group of the pipeline has parts on several
workers. A worker may lack a group, as a worker without biases does. The groups of all workers are
joined in their order, a worker's group to the one that has its weights or the same settings.
Later, a weight belongs to its group by name, wherever it moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchweft.optim.states import Options, changed_options, copied_options


class Weight(NamedTuple):
    """A weight that an optimizer steps; ordered as in the model.

    Attributes:
        stage: Number of its stage.
        place: Its place in the stage.
        name: Its name in the pipeline.
        shape: Its shape.
        dtype: The name of its type.
    """

    stage: int
    place: int
    name: str
    shape: tuple[int, ...]
    dtype: str


class PipeGroup(NamedTuple):
    """A parameter group: its hyper-parameters, and its weights."""

    options: Options
    weights: list[Weight]

    @property
    def names(self) -> list[str]:
        """The names of the weights."""
        return [each.name for each in self.weights]


class WorkerOptimizer(NamedTuple):
    """The optimizer that one worker has made of its weights.

    Attributes:
        classes: The names of its class and of those that it derives from.
        defaults: Its default hyper-parameters.
        groups: Its groups.
    """

    classes: list[str]
    defaults: Options
    groups: list[PipeGroup]


def joined(parts: Iterable[Sequence[PipeGroup]]) -> list[PipeGroup]:
    """Returns the groups of all workers as those of the pipeline, with the weights in order.

    Args:
        parts: The groups of each worker, in the order of the table's rows.
    """
    found: list[PipeGroup] = []
    for groups in parts:
        last = -1
        for place, group in enumerate(groups):
            at = _place_of(group, found, last)
            if at is None:
                at = last + 1 if _follow(groups[place + 1 :], found, last) else len(found)
                found.insert(at, PipeGroup(copied_options(group.options), []))
            found[at].weights.extend(group.weights)
            last = at
    return [_in_order(each) for each in found]


def _place_of(group: PipeGroup, found: Sequence[PipeGroup], last: int) -> int | None:
    """Returns which of the groups after the last one a worker's group is a part of, if any."""
    names = set(group.names)
    for place, each in enumerate(found):
        if not names.isdisjoint(each.names):
            return place
    for place in range(last + 1, len(found)):
        if is_same(group.options, found[place].options):
            return place
    return None


def _follow(groups: Sequence[PipeGroup], found: Sequence[PipeGroup], last: int) -> bool:
    return any(_place_of(each, found, last) is not None for each in groups)


def rejoined(
    parts: Iterable[Sequence[PipeGroup]], groups: Sequence[PipeGroup], made: Sequence[Options]
) -> list[PipeGroup]:
    """Returns the groups of the pipeline after its weights have moved to other workers.

    Each weight stays in its group, which keeps its hyper-parameters. A weight that is trained anew
    is in the group of those that its worker's optimizer put it together with, or of those that were
    made alike; else its group is a new one.

    Args:
        parts: The groups of each worker, as its optimizer made them.
        groups: The groups before.
        made: The hyper-parameters with which these were made.
    """
    number_of = {name: number for number, group in enumerate(groups) for name in group.names}
    found = [PipeGroup(group.options, []) for group in groups]
    for group in joined(parts):
        numbers = [number_of[name] for name in group.names if name in number_of]
        alike = [place for place, each in enumerate(made) if is_same(each, group.options)]
        others = (numbers or alike or [len(found)])[0]
        for weight in group.weights:
            number = number_of.get(weight.name, others)
            if number == len(found):
                found.append(PipeGroup(copied_options(group.options), []))
            found[number].weights.append(weight)
    return [_in_order(each) for each in found]


def _in_order(group: PipeGroup) -> PipeGroup:
    """Returns a group with its weights in the order of the model, each once."""
    once = {each.name: each for each in sorted(group.weights, reverse=True)}
    return PipeGroup(group.options, sorted(once.values()))


def is_same(first: Options, second: Options) -> bool:
    """Whether hyper-parameters are equal."""
    return first.keys() == second.keys() and not changed_options(first, second)


# Saved groups


def saved_groups(groups: Sequence[PipeGroup]) -> list[dict[str, Any]]:
    """Returns groups as plain data: hyper-parameters, and names of weights as ``params``."""
    return [{**copied_options(each.options), "params": each.names} for each in groups]


def differences(saved: Sequence[Mapping[str, Any]], groups: Sequence[PipeGroup]) -> Iterator[str]:
    """Yields the differences because of which saved groups cannot be those of a pipeline."""
    if len(saved) != len(groups):
        yield f"{len(saved)} parameter groups there and {len(groups)} here"
        return
    there = [name for group in saved for name in group["params"]]
    here = {name for group in groups for name in group.names}
    missing, unexpected = sorted(here - set(there)), sorted(set(there) - here)
    if missing or unexpected:
        yield f"weights of other names: missing {missing}, unexpected {unexpected}"
    if len(set(there)) < len(there):
        yield "a weight that is in two groups"


def restored_groups(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[PipeGroup]
) -> list[PipeGroup]:
    """Returns saved groups, which have no ``differences``, with the weights of the pipeline."""
    weights = {each.name: each for group in groups for each in group.weights}
    return [
        _in_order(
            PipeGroup(
                copied_options({key: value for key, value in group.items() if key != "params"}),
                [weights[name] for name in group["params"]],
            )
        )
        for group in saved
    ]
