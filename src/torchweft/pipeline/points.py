"""Cuts any traceable model at named modules."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree

from torchweft.arguments import did_you_mean, kind_of, wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.pipeline.cutting import Stages, check_like_model, cut_evenly, find_ties
from torchweft.pipeline.errors import CutError
from torchweft.pipeline.partition import Profile
from torchweft.pipeline.tracing import (
    INPUT,
    ModelTrace,
    Operation,
    StateName,
    TracedStage,
    Value,
    mapped,
    trace,
)
from torchweft.pipeline.wiring import BATCH, Take, Wiring


class SplitPoint(enum.Enum):
    """Where a model is cut: before a module, or after it."""

    BEGINNING = 1
    END = 2


def cut_model(
    model: nn.Module,
    cuts: Mapping[str, SplitPoint] | int,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    profile: Profile | None = None,
) -> Stages:
    """Cuts a model before or after the modules with these names.

    The model's code is traced with torch.fx, but only that of modules with a cut inside; others
    may do anything. Each stage takes exactly the values that it uses, from any earlier stage and
    from the batch. A cut may be inside of a residual block: the skip then goes from stage to stage.
    Sizes, such as ``x.shape[0]``, are values too, so batches of any size fit.

    The batch for the pipeline has the form of the examples. For ``model(x)`` it is ``x``. For
    ``model(x, y)`` it is a tuple. If a keyword argument is given, it is a dict by the names of the
    parameters. Without examples, the parameters without a default are positional arguments.

    Weights keep their names in the model, so ``Pipe.state_dict`` has its keys. A weight that
    several stages use is in each of them, and these copies are tied. The stages hold the model's
    own submodules, until they are copied to their workers.

    Control flow that depends on a tensor's values or sizes, changes in place to values of another
    stage, and ``torch.no_grad`` or ``autocast`` cannot be traced. Python values of the model, such
    as flags, become constants. The exception is ``training``: an argument that depends on it
    follows the stage's mode. Not thread-safe: no other thread may use torch modules meanwhile.

    Args:
        model: The model.
        cuts: The names, each with ``SplitPoint.BEGINNING`` or ``END``, in any order; the enum of
            torch.distributed.pipelining works as well. For an ``nn.Sequential``, a number of
            stages: it is cut so that the largest stage is as small as possible.
        example_args: Positional arguments of the model, for one micro-batch of any size. Arguments
            without tensors become constants. With examples, the stages are run without computing,
            and their shapes compared with those of the model.
        example_kwargs: Keyword arguments; the same holds for them.
        profile: With a number of stages, the measured layers, whose times are balanced. By default
            numbers of weights are.

    Raises:
        CutError: A name is not a module's, two cuts are in the same place, or the code of a module
            with a cut inside cannot be traced; names module and line.
        StageMismatch: The stages cannot take each other's values, or the examples.
        ConfigurationError: Two stages would update one buffer.
    """
    if isinstance(cuts, int):
        if not isinstance(model, nn.Sequential):
            raise ArgumentTypeError(
                f"cuts is a number of stages, and the model is {kind_of(model)}; pass an "
                'nn.Sequential, or the cuts by name: {"layers.2": SplitPoint.BEGINNING}'
            )
        return cut_evenly(model, cuts, profile)
    if profile is not None:
        raise ConfigurationError("profile is for a number of stages; these cuts are named")
    points = _checked_points(model, cuts)
    arguments = _arguments(model, example_args, dict(example_kwargs or {}))
    found = trace(model, list(points), arguments.args, arguments.kwargs)
    steps = _without_unused(found.steps)
    sections = _sections(steps, _bounds(found, steps, points))
    _check_in_place(steps, sections, model)
    stages = _assembled(model, steps, sections, arguments.takes, found.only_mode)
    if example_args or example_kwargs:
        check_like_model(stages, model, example_args, example_kwargs or {}, arguments.batch)
    return stages


def _checked_points(model: nn.Module, cuts: Mapping[str, Any]) -> dict[str, SplitPoint]:
    names = dict(model.named_modules(remove_duplicate=False))
    points: dict[str, SplitPoint] = {}
    if not isinstance(cuts, Mapping):
        raise wrong_type("cuts", cuts, 'pass {"layers.2": SplitPoint.BEGINNING}')
    for name, point in cuts.items():
        if name not in names or not name:
            raise CutError(
                f"the model has no module {name!r} to cut at{did_you_mean(str(name), names)}",
                module=str(name),
            )
        try:
            points[name] = SplitPoint[point.name]
        except (AttributeError, KeyError):
            raise wrong_type(
                f"the cut at {name!r}", point, "pass SplitPoint.BEGINNING or SplitPoint.END"
            ) from None
    return points


# The batch


class _Arguments(NamedTuple):
    """The arguments to trace a model with.

    Attributes:
        args: Positional arguments; ``INPUT`` stands for an input.
        kwargs: Keyword arguments.
        takes: How each input is taken from the batch.
        batch: The examples in the form of the batch.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    takes: list[Take]
    batch: Any


def _arguments(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> _Arguments:
    signature = inspect.signature(model.forward)
    if not args and not kwargs:
        args = [
            INPUT
            for each in signature.parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            and each.default is each.empty
        ]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be called with these examples: {error}"
        ) from None
    names = [
        name
        for name, each in signature.parameters.items()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if kwargs and len(args) > len(names):
        raise ConfigurationError(
            f"the batch would be a dict, and {len(args) - len(names)} of the positional arguments "
            "have no name; pass all examples in example_args"
        )
    given = [INPUT if _is_input(each) else each for each in args]
    named = {name: INPUT if _is_input(each) else each for name, each in kwargs.items()}
    keys: list[Any] = [*(names[: len(args)] if kwargs else range(len(args))), *kwargs]
    if len(keys) == 1 and not kwargs:
        keys = [None]
    takes = [
        Take(BATCH, key)
        for key, each in zip(keys, (*given, *named.values()), strict=True)
        if each is INPUT
    ]
    batch: Any = dict(zip(keys, (*args, *kwargs.values()), strict=True)) if kwargs else tuple(args)
    return _Arguments(given, named, takes, batch[0] if keys == [None] else batch)


def _is_input(value: Any) -> bool:
    return value is INPUT or any(isinstance(each, Tensor) for each in _pytree.tree_leaves(value))


# Where the cuts are


def _names(value: Any, kind: type[Value] | type[StateName] = Value) -> list[str]:
    """Returns the names of the values, or of the weights and buffers, in an argument, each once."""
    found: dict[str, None] = {}

    def look(each: Any) -> Any:
        if isinstance(each, kind):
            found[each.name] = None
        return mapped(each, look)

    look(value)
    return list(found)


def _without_unused(steps: Sequence[Operation]) -> list[Operation]:
    """Returns the steps without those that only look at a value, if nothing uses the result."""
    used: set[str] = set()
    kept = []
    for step in reversed(steps):
        if step.name in used or not _is_look(step):
            used.update(_names((step.args, step.kwargs)))
            kept.append(step)
    return kept[::-1]


def _is_look(step: Operation) -> bool:
    """Whether a step takes a part of a value that another step has made."""
    return (
        step.kind == "function"
        and step.target in (operator.getitem, getattr)
        and isinstance(step.args[0], Value)
        and isinstance(step.args[1], (int, str))
    )


def _bounds(
    found: ModelTrace, steps: Sequence[Operation], points: Mapping[str, SplitPoint]
) -> list[str]:
    """Returns the name of the first step of each stage but the first.

    Raises:
        CutError: A module is not called exactly once, or a stage would have no step.
    """
    kept = {step.name for step in steps}
    places: dict[int, str] = {}
    # A stage begins with a step that does something: no input, no weight, no look at a value.
    work = [
        number
        for number, step in enumerate(found.steps)
        if step.name in kept and step.kind not in ("input", "state") and not _is_look(step)
    ]
    for name, point in points.items():
        spans = found.spans[name]
        if len(spans) != 1:
            raise CutError(_calls_text(name, len(spans)), module=name)
        bound = spans[0][point is SplitPoint.END]
        place = sum(number < bound for number in work)
        reason = ""
        if place in places:
            reason = f"the cut at {places[place]!r} is in the same place"
        elif place == 0 or found.steps[work[place]].kind == "output":
            reason = f"nothing is {'after' if place else 'before'} it"
        if reason:
            raise CutError(f"the cut at {name!r} makes an empty stage: {reason}", module=name)
        places[place] = name
    return [found.steps[work[place]].name for place in sorted(places)]


def _calls_text(name: str, n_calls: int) -> str:
    if n_calls:
        return (
            f"the model calls {name!r} {n_calls} times, so a cut there would be ambiguous; cut at "
            "a module that it calls once"
        )
    return (
        f"the model does not call {name!r}, so there is no cut before or after it; cut at a module "
        f"that it calls, such as a child of a ModuleList ({name + '.0'!r})"
    )


def _sections(steps: Sequence[Operation], bounds: Sequence[str]) -> dict[str, int]:
    """Returns the stage of each step; inputs have none.

    A step that looks at a value is in the stage that made it, so that only what is used is sent.
    """
    sections: dict[str, int] = {}
    stage = 0
    for step in steps:
        stage += step.name in bounds
        if step.kind in ("input", "state"):
            continue
        made = sections.get(step.args[0].name) if _is_look(step) else None
        sections[step.name] = stage if made is None else made
    return sections


def _check_in_place(
    steps: Sequence[Operation], sections: Mapping[str, int], model: nn.Module
) -> None:
    """Refuses changes in place to a value of another stage, which that stage would not see."""
    for step in steps:
        first = step.args[0] if step.args else None
        if not isinstance(first, Value) or not _is_in_place(step, model):
            continue
        source, stage = sections.get(first.name, BATCH), sections[step.name]
        if source not in (stage, BATCH):
            raise CutError(
                f"stage {stage} changes a value of stage {source} in place, at {step.place}; make "
                "the change out of place, or cut elsewhere",
                place=step.place,
            )


def _is_in_place(step: Operation, model: nn.Module) -> bool:
    if step.kind == "module":
        return getattr(model.get_submodule(step.target), "inplace", False) is True
    name = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", "")
    return (
        step.kwargs.get("inplace") is True
        or (name.endswith("_") and not name.endswith("__"))
        or step.target in (operator.setitem, operator.iadd, operator.isub, operator.imul)
    )


# The stages


def _assembled(
    model: nn.Module,
    steps: Sequence[Operation],
    sections: Mapping[str, int],
    takes: Sequence[Take],
    only_mode: bool | None,
) -> Stages:
    """Returns the stages.

    Args:
        model: The model.
        steps: Its steps.
        sections: The stage of each step.
        takes: How each input is taken from the batch.
        only_mode: The training mode that the steps are for; None for both.

    Raises:
        ConfigurationError: A stage takes nothing, or nothing takes its output.
    """
    names = [step.name for step in steps if step.kind == "input"]
    inputs = dict(zip(names, takes, strict=True))
    n_stages = max(sections.values()) + 1
    of_stage = [
        [step for step in steps if sections.get(step.name) == stage] for stage in range(n_stages)
    ]
    given = [_taken(own) for own in of_stage]
    wiring = Wiring.checked(
        [[inputs.get(name) or Take(sections[name], name) for name in taken] for taken in given]
    )
    parts = []
    for stage, (own, taken) in enumerate(zip(of_stage, given, strict=True)):
        later = [name for names in given[stage + 1 :] for name in names]
        result: Any = {name: Value(name) for name in later if sections.get(name) == stage}
        if own[-1].kind == "output":
            *own, output = own
            result = output.args[0]
        part = TracedStage(taken, _operations(own, result), result, only_mode)
        part.training = model.training
        _place_modules(model, part, own, result)
        parts.append(part)
    _add_the_rest(model, parts)
    return Stages(
        tuple(parts), dataclasses.replace(wiring, spreads=False), find_ties(parts), has_names=True
    )


def _taken(steps: Sequence[Operation]) -> list[str]:
    """Returns the names of the values that a stage takes from others."""
    own = {step.name for step in steps}
    used = _names([(step.args, step.kwargs) for step in steps])
    return [name for name in used if name not in own]


def _place_modules(
    model: nn.Module, part: TracedStage, steps: Sequence[Operation], result: object
) -> None:
    """Gives a part the submodules and weights that its steps use."""
    for name in sorted({str(step.target) for step in steps if step.kind == "module"}, key=len):
        part.place(name, model.get_submodule(name))
    for name in _names([(step.args, step.kwargs) for step in steps] + [result], StateName):
        _add_state(model, part, name)


def _operations(steps: Sequence[Operation], result: Any) -> list[Operation]:
    """Returns the steps as operations, each with the values that it is the last one to use."""
    needed = set(_names(result))
    operations = []
    for step in reversed(steps):
        used = [*_names((step.args, step.kwargs)), step.name]
        last = tuple(name for name in dict.fromkeys(used) if name not in needed)
        needed.update(used)
        operations.append(step._replace(last_uses=last))
    return operations[::-1]


def _add_state(model: nn.Module, part: TracedStage, name: str) -> None:
    owner_name, _, last = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    is_persistent = last not in owner._non_persistent_buffers_set
    part.place(name, getattr(owner, last), is_persistent=is_persistent)


def _add_the_rest(model: nn.Module, parts: Sequence[TracedStage]) -> None:
    """Adds weights and buffers that no operation names: other names of the same, and unused ones.

    With them the stages have all keys of the model's ``state_dict``.
    """
    holders: dict[int, TracedStage] = {}
    names: set[str] = set()
    for part in parts:
        for name, tensor in _all_states(part):
            holders.setdefault(id(tensor), part)
            names.add(name)
    for name, tensor in _all_states(model):
        if name not in names:
            _add_state(model, holders.get(id(tensor), parts[0]), name)


def _all_states(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
