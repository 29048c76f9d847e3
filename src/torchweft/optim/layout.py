"""The ``state_dict`` of a distributed optimizer: its format, and a check that it fits.

It equals that of a local optimizer over the same parameters in the same order, plus one key::

    {
        "state": {0: {"exp_avg": ..., ...}, 1: ...},          # by number of the parameter
        "param_groups": [{"lr": 0.1, ..., "params": [0, 1]}, ...],
        "parameters": [{"owner": "ps0", "shape": (3, 4)}, ...],  # by number; Weft's own
    }

So training can move to a single process, or from one, or to other owners of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchweft.errors import ConfigurationError
from torchweft.optim.groups import Options

_NOT_OPTIONS = ("params", "param_names")


class Parameter(NamedTuple):
    """The name of a parameter's owner, and its shape."""

    owner: str
    shape: tuple[int, ...]


def as_state_dict(
    options: Sequence[Options],
    group_sizes: Sequence[int],
    state: dict[Any, Any],
    parameters: Sequence[Parameter],
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
        "parameters": [{"owner": owner, "shape": shape} for owner, shape in parameters],
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
    state_dict: Any, group_sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raises ConfigurationError, naming the difference, if a ``state_dict`` does not fit.

    Args:
        state_dict: The ``state_dict`` to load.
        group_sizes: How many parameters each group of the optimizer has.
        shapes: The shapes of all parameters, in order.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ConfigurationError(
            'this is no state_dict of an optimizer: it has no "state" and "param_groups"'
        )
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if len(sizes) != len(group_sizes):
        raise _misfit(f"{len(sizes)} parameter groups, the optimizer {len(group_sizes)}")
    for group, (saved, mine) in enumerate(zip(sizes, group_sizes, strict=True)):
        if saved != mine:
            raise _misfit(f"{saved} parameters in group {group}, the optimizer {mine}")
    for number, parameter in enumerate(state_dict.get("parameters", ())):
        shape = tuple(parameter["shape"])
        if shape != shapes[number]:
            raise _misfit(f"shape {shape} for parameter {number}, the optimizer {shapes[number]}")


def _misfit(difference: str) -> ConfigurationError:
    return ConfigurationError(
        f"the state_dict has {difference}; make the optimizer with the same parameters in the "
        "same order as the one that was saved"
    )
