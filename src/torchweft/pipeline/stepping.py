"""The optimizer of one worker's weights, as the driver of a pipeline calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.optim import states
from torchweft.optim.local import step_optimizer
from torchweft.optim.states import Options, copied_options
from torchweft.pipeline.groups import Group, Made, Weight
from torchweft.pipeline.host import runner_of
from torchweft.pipeline.weights import Where, optimizer_state, set_optimizer_state, weights_of


def make(
    where: Where, optimizer_class: Callable[..., Optimizer], options: Mapping[str, Any]
) -> Made | None:
    """Makes the optimizer of this worker's weights; returns None if it has no weights.

    Raises:
        ArgumentTypeError: ``optimizer_class`` returned no optimizer.
        ConfigurationError: The optimizer needs a closure, or steps something else.
    """
    runner = runner_of(where.pipe)
    runner.optimizer, runner.group_numbers = None, []
    weights = [weight for stage in runner.stages.values() for weight in stage.parameters()]
    if not weights:
        return None
    optimizer = optimizer_class(weights, **options)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"optimizer_class returned {kind_of(optimizer)}; it returns an optimizer, as a class "
            "of torch.optim does"
        )
    kind = type(optimizer)
    if states.needs_closure(kind):
        raise ConfigurationError(
            f"{kind.__name__} evaluates the model anew within a step, by a closure, and needs all "
            "weights in one place; use an optimizer that steps with given gradients"
        )
    found = _names(where)
    groups = [
        Group(_options(group), [each for weight in group["params"] for each in found[weight]])
        for group in optimizer.param_groups
        if _are_known(group["params"], found)
    ]
    runner.optimizer, runner.group_numbers = optimizer, list(range(len(groups)))
    return Made(states.lineage(kind), copied_options(optimizer.defaults), groups)


def _names(where: Where) -> dict[Tensor, list[Weight]]:
    """Returns each weight with its descriptions: one for each of its names."""
    found: dict[Tensor, list[Weight]] = {}
    for place, (name, (stage, weight)) in enumerate(weights_of(where).items()):
        dtype = str(weight.dtype).removeprefix("torch.")
        described = Weight(stage, place, name, tuple(weight.shape), dtype)
        found.setdefault(weight, []).append(described)
    return found


def _are_known(weights: Sequence[Tensor], found: Mapping[Tensor, object]) -> bool:
    for weight in weights:
        if weight not in found:
            raise ConfigurationError(
                f"the optimizer steps a tensor of shape {tuple(weight.shape)} that is no weight of "
                "this worker's stages; make it of the weights that its function is called with"
            )
    return True


def _options(group: Mapping[str, Any]) -> Options:
    return copied_options({key: value for key, value in group.items() if key != "params"})


def arrange(where: Where, groups: Sequence[tuple[Options, Sequence[str]]]) -> None:
    """Puts this worker's weights into the groups of the pipeline, with their hyper-parameters.

    Args:
        where: The pipeline.
        groups: The hyper-parameters of each group, and the names of its weights on all workers.
    """
    runner = runner_of(where.pipe)
    optimizer = runner.optimizer
    if optimizer is None:
        return
    own = weights_of(where)
    present = {frozenset(group["params"]): group for group in optimizer.param_groups}
    arranged, runner.group_numbers = [], []
    for number, (options, names) in enumerate(groups):
        weights = list(dict.fromkeys(own[name][1] for name in names if name in own))
        if not weights:
            continue
        group = present.get(frozenset(weights), {"params": weights})
        group.update(options)
        arranged.append(group)
        runner.group_numbers.append(number)
    optimizer.param_groups[:] = arranged


def options(pipe: int) -> dict[int, Options]:
    """Returns the hyper-parameters of this worker's groups, by their number in the pipeline."""
    runner = runner_of(pipe)
    groups = [] if runner.optimizer is None else runner.optimizer.param_groups
    return {
        number: _options(group) for number, group in zip(runner.group_numbers, groups, strict=True)
    }


def step(pipe: int, changes: Mapping[int, Options], zero_grad: bool | None) -> None:
    """Steps this worker's optimizer, after changes of its hyper-parameters.

    Args:
        pipe: Number of the pipeline.
        changes: The changed hyper-parameters, by the number of their group.
        zero_grad: Whether the gradients become None first, or zeros; None: they stay.
    """
    runner = runner_of(pipe)
    optimizer = runner.optimizer
    if optimizer is None:
        return
    if changes:
        for number, group in zip(runner.group_numbers, optimizer.param_groups, strict=True):
            group.update(changes.get(number, {}))
    if zero_grad is not None:
        runner.zero_grad(zero_grad)
    step_optimizer(optimizer)


def zero_grad(pipe: int, set_to_none: bool) -> None:
    """Drops the gradients that this worker's optimizer steps with."""
    runner_of(pipe).zero_grad(set_to_none)


def misfits(where: Where, state: Mapping[str, Any]) -> list[str]:
    """Returns the differences because of which this worker cannot load a state."""
    optimizer = runner_of(where.pipe).optimizer
    if optimizer is None:
        return []
    present = optimizer_state(where)
    return [
        text
        for name, (_, weight) in weights_of(where).items()
        if name in state
        for text in states.misfits(
            name, weight.shape, state[name], type(optimizer), present.get(name)
        )
    ]


def load(
    where: Where, groups: Sequence[tuple[Options, Sequence[str]]], state: Mapping[str, Any]
) -> None:
    """Replaces the groups and the state of this worker's optimizer."""
    arrange(where, groups)
    set_optimizer_state(where, state)
