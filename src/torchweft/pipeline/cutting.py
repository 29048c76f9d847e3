"""Stages of a model: its parts, the values between them, and the weights they share."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.copies import Tie
from torchweft.pipeline.partition import balance
from torchweft.pipeline.wiring import Wiring

StageSource = nn.Module | Callable[[], nn.Module]
"""A stage: a module, which is copied to its worker, or a function that makes it there."""


@dataclass(frozen=True)
class Stages:
    """A model as stages.

    Attributes:
        sources: The stages.
        wiring: The values between them.
        ties: Weights that several stages share.
        has_names: Whether the names of weights are unique in the model, as those of its parts are.
    """

    sources: tuple[StageSource, ...]
    wiring: Wiring
    ties: tuple[Tie, ...] = ()
    has_names: bool = False


def cut_sequential(model: nn.Sequential, cuts: Sequence[int]) -> Stages:
    """Cuts a ``Sequential`` before the children with these numbers.

    Weights that two parts share become ties. The children keep their names.

    Raises:
        ConfigurationError: The cuts do not rise, or a part has no child.
    """
    bounds = [0, *cuts, len(model)]
    if any(first >= second for first, second in itertools.pairwise(bounds)):
        raise ConfigurationError(
            f"the cuts {list(cuts)} do not cut {len(model)} layers into stages of at least one "
            f"layer; pass rising numbers from 1 to {len(model) - 1}"
        )
    children = list(model._modules.items())
    parts = [
        nn.Sequential(OrderedDict(children[first:second]))
        for first, second in itertools.pairwise(bounds)
    ]
    ties = find_ties(parts)
    return Stages(tuple(parts), Wiring.chain(len(parts), spreads=False), ties, has_names=True)


def cut_evenly(model: nn.Sequential, n_stages: int) -> Stages:
    """Cuts a ``Sequential`` into stages whose largest number of weights is as small as possible.

    Raises:
        ConfigurationError: It has fewer children than stages.
    """
    if len(model) < n_stages:
        raise ConfigurationError(
            f"a Sequential of {len(model)} layers cannot be cut into {n_stages} stages; pass fewer "
            "workers, or a model with more layers"
        )
    weights = [sum(each.numel() for each in child.parameters()) for child in model]
    return cut_sequential(model, balance(weights, n_stages))


def stages_of(model: object, n_stages: int, wiring: Wiring | None, ties: Iterable[Tie]) -> Stages:
    """Returns the stages that a program passed.

    Args:
        model: A ``Sequential``, which is cut evenly; ``Stages``; or a sequence with a module, or a
            function that makes one, for each stage.
        n_stages: How many stages the schedule has.
        wiring: The values between the stages of a sequence; by default a chain.
        ties: Weights that stages of a sequence share, besides those found.

    Raises:
        ArgumentTypeError: It is nothing of that kind.
        ConfigurationError: The number of stages is another one.
    """
    if isinstance(model, nn.Sequential) and wiring is None:
        model = cut_evenly(model, n_stages)
    if not isinstance(model, Stages):
        model = _listed(model, wiring, tuple(ties))
    found = len(model.sources)
    if found != n_stages or len(model.wiring.takes) != n_stages:
        raise ConfigurationError(
            f"the schedule has {n_stages} stages on these workers, and there are {found} stages "
            f"with arguments for {len(model.wiring.takes)}; pass one stage for each"
        )
    return model


def _listed(model: object, wiring: Wiring | None, ties: tuple[Tie, ...]) -> Stages:
    if not isinstance(model, Sequence) or isinstance(model, str):
        raise ArgumentTypeError(
            f"stages is {kind_of(model)}; pass a Sequential, or a list with a module, or a "
            "function that makes one, for each stage"
        )
    for each in model:
        if not callable(each):
            raise ArgumentTypeError(
                f"a stage is {kind_of(each)}; pass a module, or a function that makes one"
            )
    parts = [each if isinstance(each, nn.Module) else None for each in model]
    found = find_ties(parts)
    wiring = wiring or Wiring.chain(len(model), spreads=True)
    return Stages(tuple(model), wiring, tuple(dict.fromkeys((*found, *ties))))


def find_ties(parts: Sequence[nn.Module | None]) -> tuple[Tie, ...]:
    """Returns the weights that several of these modules share."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, part in enumerate(parts):
        if part is not None:
            for name, weight in part.named_parameters():
                places.setdefault(id(weight), []).append((stage, name))
    return tuple(tuple(found) for found in places.values() if len(found) > 1)
