"""Stages of a model: its parts, the values between them, and the weights they share."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from torchweft.arguments import checked_int, did_you_mean, kind_of, wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.copies import Tie
from torchweft.pipeline.errors import CutError
from torchweft.pipeline.partition import Plan, Profile, balance
from torchweft.pipeline.partition.text import aligned, bytes_text
from torchweft.pipeline.schedules import Table
from torchweft.pipeline.tracing import Part
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

    def __str__(self) -> str:
        """Returns an aligned table: each stage's parts, weights, and values that it takes."""
        rows = []
        for stage, source in enumerate(self.sources):
            counts = ["?", "?"]
            if isinstance(source, nn.Module):
                weights = list(source.parameters())
                if not any(map(is_lazy, weights)):
                    n_bytes = sum(each.numel() * each.element_size() for each in weights)
                    counts = [f"{sum(each.numel() for each in weights):,}", bytes_text(n_bytes)]
            rows.append([str(stage), _parts_text(source), *counts, self.wiring.text(stage)])
        header = ["stage", "parts", "weights", "bytes", "takes"]
        lines = [aligned(header, rows, left=["parts", "takes"])]
        for tie in self.ties:
            names = ", ".join(f"{name} of stage {stage}" for stage, name in tie)
            lines.append(f"tied: {names}")
        return "\n".join(lines)


def cut_sequential(model: nn.Sequential, cuts: Sequence[int | str]) -> Stages:
    """Cuts a ``Sequential`` before the children with these numbers or names.

    Weights that two parts share become ties. The children keep their names.

    Raises:
        CutError: A name is not a child's, or leads inside a child.
        ConfigurationError: The cuts do not rise, a part has no child, or two parts would update
            one buffer.
    """
    children = list(model._modules.items())
    bounds = [0, *(_number_of(model, cut) for cut in cuts), len(children)]
    if any(first >= second for first, second in itertools.pairwise(bounds)):
        raise ConfigurationError(
            f"the cuts {list(cuts)} do not cut {len(model)} layers into stages of at least one "
            f"layer; pass rising numbers from 1 to {len(model) - 1}, or names in their order"
        )
    parts = [
        nn.Sequential(OrderedDict(children[first:second]))
        for first, second in itertools.pairwise(bounds)
    ]
    for part in parts:
        part.training = model.training
    ties = find_ties(parts)
    return Stages(tuple(parts), Wiring.chain(len(parts), spreads=False), ties, has_names=True)


def _number_of(model: nn.Sequential, cut: int | str) -> int:
    """Returns the number of the child before which to cut."""
    if not isinstance(cut, str):
        return checked_int("a cut", cut)
    names = list(model._modules)
    if cut in names:
        return names.index(cut)
    child = cut.partition(".")[0]
    if child in names:
        kind = type(model._modules[child]).__name__
        raise CutError(
            f"the cut at {cut!r} is inside of the child {child!r}, a {kind}: it would be a cut "
            "through the block, which may have a residual connection. Cut before or after "
            f"{child!r}, or pass the name to cut_model, which sends the skip from stage to stage",
            module=cut,
        )
    raise CutError(f"the Sequential has no child {cut!r}{did_you_mean(cut, names)}", module=cut)


def cut_evenly(model: nn.Sequential, n_stages: int, profile: Profile | None = None) -> Stages:
    """Cuts a ``Sequential`` into stages whose largest one is as small as possible.

    Args:
        model: The model.
        n_stages: How many stages.
        profile: The measured layers, whose times are balanced; by default numbers of weights are.

    Raises:
        ConfigurationError: It has fewer children than stages, or the profile is of another model.
    """
    if len(model) < n_stages:
        raise ConfigurationError(
            f"a Sequential of {len(model)} layers cannot be cut into {n_stages} stages; pass fewer "
            "workers, or a model with more layers"
        )
    if profile is None:
        weights = [sum(each.numel() for each in child.parameters()) for child in model]
        return cut_sequential(model, balance(weights, n_stages))
    _check_layers("profile", len(profile.layers), model)
    return cut_sequential(model, balance(profile, n_stages))


def cut_by_plan(model: nn.Sequential, plan: Plan, table: Table | None = None) -> Stages:
    """Cuts a ``Sequential`` into the stages of a plan.

    Args:
        model: The model that the plan is for; each of its children is a layer.
        plan: The plan. The first worker of the pipeline is the first of the plan's stages.
        table: The schedule's table, ``schedule.table(n_workers)``; needed if a stage of the plan
            has several workers.

    Raises:
        ConfigurationError: The plan is for another number of layers, or the table does not have
            the plan's stages and workers.
    """
    _check_layers("plan", plan.n_layers, model)
    planned = [stage.replicas for stage in plan.stages]
    if table is None:
        if max(planned) > 1:
            raise ConfigurationError(
                f"the plan {plan.shape} has stages with several workers; pass the table of a "
                f"schedule that has them: Schedule1F1B(..., replicas={tuple(planned)}).table("
                f"{sum(planned)})"
            )
    else:
        held = [len(table.replicas(stage)) for stage in range(table.n_stages)]
        if held != planned:
            raise ConfigurationError(
                f"the plan {plan.shape} has {planned} workers by stage, and the table "
                f"{table.name!r} has {held}; pass the schedule replicas={tuple(planned)}, or a "
                "plan for its workers"
            )
    return cut_sequential(model, [stage.layers.start for stage in plan.stages[1:]])


def _check_layers(name: str, n_layers: int, model: nn.Sequential) -> None:
    if not isinstance(model, nn.Sequential):
        raise wrong_type("model", model, "pass the nn.Sequential whose children are the layers")
    if n_layers != len(model):
        raise ConfigurationError(
            f"the {name} has {n_layers} layers, and the model {len(model)}; pass the {name} of "
            "this model"
        )


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
    """Returns the weights that several of these modules share.

    Each stage has its own copy of a shared buffer, so a buffer that stages update cannot be shared.

    Raises:
        ConfigurationError: Two stages would update one buffer.
    """
    _check_buffers(parts)
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, part in enumerate(parts):
        if part is not None:
            for name, weight in part.named_parameters():
                places.setdefault(id(weight), []).append((stage, name))
    return tuple(tuple(found) for found in places.values() if len(found) > 1)


def _check_buffers(parts: Sequence[nn.Module | None]) -> None:
    """Refuses a normalization with running statistics that is in several stages."""
    places: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for name, module in part.named_modules() if part is not None else ():
            if not (isinstance(module, _NormBase) and module.training):
                continue
            if not isinstance(module.running_mean, Tensor):
                continue
            other, other_name = places.setdefault(id(module.running_mean), (stage, name))
            if other != stage:
                raise ConfigurationError(
                    f"stages {other} and {stage} share the running statistics of "
                    f"{other_name!r} and {name!r}, and each would update its own copy; give each "
                    "stage its own normalization, or set eval() on it"
                )


def _parts_text(source: StageSource) -> str:
    """Returns the parts of a stage: the names of the modules that it runs."""
    if not isinstance(source, nn.Module):
        return f"{getattr(source, '__qualname__', type(source).__name__)}()"
    if isinstance(source, nn.Sequential):
        return ", ".join(source._modules)
    if isinstance(source, Part):
        return ", ".join(source.part_names) or "(no module)"
    return type(source).__name__
