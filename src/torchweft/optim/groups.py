"""The parameter groups of a distributed optimizer: as given, as parts of owners, and as saved."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc import RRef
from torchweft.serialize.registry import rebuilds_plain

Reference = RRef[Any]
Options = dict[str, Any]
"""The hyper-parameters of one group: all its entries except ``params``."""


def changed_options(group: Mapping[str, Any], told: Options) -> Options:
    """Returns copies of a group's hyper-parameters that differ from those told before."""
    return copied_options(
        {
            key: value
            for key, value in group.items()
            if key != "params"
            and (key not in told or (value is not told[key] and not _is_same(value, told[key])))
        }
    )


def check_members(present: Sequence[Sequence[Any]], known: Sequence[Sequence[Any]]) -> None:
    """Raises if the program has put other parameters into the groups than their owners have.

    Args:
        present: The parameters of each group now.
        known: Those that the owners have.

    Raises:
        ConfigurationError: They are not the same objects, in the same order.
    """
    pairs = zip(present, known, strict=False)
    is_same = len(present) == len(known) and all(
        len(mine) == len(theirs) and all(map(operator.is_, mine, theirs)) for mine, theirs in pairs
    )
    if not is_same:
        raise ConfigurationError(
            "param_groups has other parameters or groups than the optimizers on the workers, which "
            "step all that they were made with: add parameters by add_param_group where the class "
            "has it, call requires_grad_(False) of those that are to stay where they live, or make "
            "a new optimizer"
        )


def copied_options(options: Mapping[str, Any]) -> Options:
    """Returns a deep copy: later changes within a tensor or list do not affect it."""
    return {key: copy.deepcopy(value) for key, value in options.items()}


def _is_same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return type(first) is type(second) and bool(first == second)


class Group(NamedTuple):
    """A parameter group: hyper-parameters, and references to its parameters."""

    options: Options
    parameters: list[Reference]


@rebuilds_plain
class GroupPart(NamedTuple):
    """The part of a parameter group that lives on one worker.

    Attributes:
        group: Number of the group in the optimizer.
        options: The hyper-parameters that the user gave for the group.
        numbers: Positions of the parameters among all parameters of the optimizer.
        parameters: References to them.
    """

    group: int
    options: Options
    numbers: list[int]
    parameters: list[Reference]


def read_groups(given: Iterable[Any]) -> list[Group]:
    """Converts a list of references, or of dicts with ``params``, to groups.

    Raises:
        ConfigurationError: There is no parameter, or one is not a reference or occurs twice.
    """
    if isinstance(given, (torch.Tensor, RRef, Mapping, str)) or not isinstance(given, Iterable):
        raise ArgumentTypeError(
            f"params_rref is {kind_of(given)}; pass a list of RRefs, or a list of dicts "
            'like {"params": [rrefs], "lr": 0.1}'
        )
    items = list(given)
    if not items:
        raise ConfigurationError("params_rref is empty; pass at least one RRef to a parameter")
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    groups = [read_group(item, number) for number, item in enumerate(items)]
    check_distinct([reference for group in groups for reference in group.parameters])
    return groups


def read_group(given: Any, number: int) -> Group:
    """Converts a dict with ``params`` to a group.

    Args:
        given: The dict.
        number: Number of the group, for messages.

    Raises:
        ConfigurationError: It is not such a dict, has no parameters, or has a parameter that is
            not a reference.
    """
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"params_rref mixes dicts with a {type(given).__name__} at {number}; pass either "
            "RRefs or parameter groups"
        )
    if "params" not in given:
        raise ConfigurationError(
            f'parameter group {number} has no "params"; add "params": [rrefs] to it'
        )
    options = {key: value for key, value in given.items() if key != "params"}
    parameters = given["params"]
    references = [parameters] if isinstance(parameters, RRef) else list(parameters)
    if not references:
        raise ConfigurationError(f"parameter group {number} is empty; leave it out")
    for position, reference in enumerate(references):
        _check_reference(reference, f"parameter {position} of group {number}")
    return Group(options, references)


def read_references(given: Iterable[Any]) -> list[Reference]:
    """Returns references to parameters as a list.

    Raises:
        ConfigurationError: A parameter is not a reference, or occurs twice.
    """
    references = [given] if isinstance(given, RRef) else list(given)
    for position, reference in enumerate(references):
        _check_reference(reference, f"parameter {position}")
    check_distinct(references)
    return references


def check_distinct(references: Sequence[Reference]) -> None:
    """Raises ConfigurationError if a reference occurs twice."""
    seen: dict[object, int] = {}
    for position, reference in enumerate(references):
        first = seen.setdefault(reference.id, position)
        if first != position:
            raise ConfigurationError(
                f"parameters {first} and {position} are the same, {reference!r}; leave one out"
            )


def _check_reference(reference: object, what: str) -> None:
    if isinstance(reference, RRef):
        return
    fix = (
        "pass torchweft.RRef(parameter)"
        if isinstance(reference, torch.Tensor)
        else "pass RRefs, for instance those of RemoteModule.remote_parameters()"
    )
    raise ArgumentTypeError(f"{what} is {kind_of(reference)}, not an RRef; {fix}")


def by_owner(references: Iterable[Reference]) -> dict[int, list[tuple[int, Reference]]]:
    """Returns references with their positions, by the rank of the worker that owns them."""
    found: dict[int, list[tuple[int, Reference]]] = {}
    for position, reference in enumerate(references):
        found.setdefault(reference.id.owner, []).append((position, reference))
    return found


def split_groups(
    groups: Sequence[Group], first_group: int = 0, first_number: int = 0
) -> dict[int, list[GroupPart]]:
    """Returns the parts of some groups, by the rank of their owner.

    Args:
        groups: The groups.
        first_group: Number of the first group.
        first_number: Number of its first parameter.
    """
    parts: dict[int, list[GroupPart]] = {}
    for group, (options, parameters) in enumerate(groups, start=first_group):
        for owner, members in by_owner(parameters).items():
            numbers = [first_number + position for position, _ in members]
            own = [reference for _, reference in members]
            parts.setdefault(owner, []).append(GroupPart(group, options, numbers, own))
        first_number += len(parameters)
    return parts


# The ``state_dict``. It equals that of a local optimizer over the same parameters in the same
# order, plus one key::
#
#     {
#         "state": {0: {"exp_avg": ..., ...}, 1: ...},          # by number of the parameter
#         "param_groups": [{"lr": 0.1, ..., "params": [0, 1]}, ...],
#         "parameters": [{"owner": "ps0", "shape": (3, 4), "dtype": "float32"}, ...],  # by number
#         "classes": ["Adam"],                                  # these two are Weft's own
#     }
#
# So training can move to a single process, or from one, or to other owners of the parameters.

_NOT_OPTIONS = ("params", "param_names")


class Parameter(NamedTuple):
    """The name of a parameter's owner, its shape, and the name of its type.

    A lazy module's parameter has no shape before the first forward pass.
    """

    owner: str
    shape: tuple[int, ...] | None
    dtype: str


def as_state_dict(
    options: Sequence[Options],
    group_sizes: Sequence[int],
    state: dict[Any, Any],
    parameters: Sequence[Parameter],
    classes: Sequence[str],
) -> dict[str, Any]:
    """Returns a ``state_dict``; groups and parameters are in order."""
    first = 0
    groups = []
    for group_options, size in zip(options, group_sizes, strict=True):
        groups.append({**group_options, "params": list(range(first, first + size))})
        first += size
    return {
        "state": state,
        "param_groups": groups,
        "parameters": [each._asdict() for each in parameters],
        "classes": list(classes),
    }


def read_options(state_dict: Mapping[str, Any]) -> list[Options]:
    """Returns the hyper-parameters of each group of a ``state_dict``."""
    return [
        {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        for group in state_dict["param_groups"]
    ]


def read_state(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the state of each parameter by position; the groups may number them arbitrarily."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    position = {number: place for place, number in enumerate(numbers)}
    return {position.get(key, key): value for key, value in state_dict["state"].items()}


def check_fits(
    state_dict: Any, group_sizes: Sequence[int], parameters: Sequence[Parameter]
) -> None:
    """Raises ConfigurationError, naming the difference, if a ``state_dict`` does not fit.

    Args:
        state_dict: The ``state_dict`` to load.
        group_sizes: How many parameters each group of the optimizer has.
        parameters: All parameters, in order.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ConfigurationError(
            'this is no state_dict of an optimizer: it has no "state" and "param_groups"'
        )
    if not all("params" in group for group in state_dict["param_groups"]):
        raise ConfigurationError(
            'this is no state_dict of an optimizer: a parameter group has no "params"'
        )
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if len(sizes) != len(group_sizes):
        raise misfit(f"{len(sizes)} parameter groups, the optimizer {len(group_sizes)}")
    for group, (saved, mine) in enumerate(zip(sizes, group_sizes, strict=True)):
        if saved != mine:
            raise misfit(f"{saved} parameters in group {group}, the optimizer {mine}")
    for number, parameter in enumerate(state_dict.get("parameters", ())):
        shape, present = parameter["shape"], parameters[number]
        if None not in (shape, present.shape) and tuple(shape) != present.shape:
            raise misfit(
                f"shape {tuple(shape)} for parameter {number}, the optimizer {present.shape}"
            )
        dtype = parameter.get("dtype", present.dtype)
        if dtype != present.dtype:
            raise misfit(f"type {dtype} for parameter {number}, the optimizer {present.dtype}")


def misfit(difference: str) -> ConfigurationError:
    """Returns the error for a ``state_dict`` that does not fit."""
    return ConfigurationError(
        f"the state_dict has {difference}; make the optimizer with the same parameters in the "
        "same order as the one that was saved"
    )
