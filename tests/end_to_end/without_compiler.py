"""Compares Weft's and PyTorch's steps. A program of its own: it ends with the compiler loaded."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from tests.unit.optim.references import reference
from torchweft.engine.threads.device_streams import new_guard
from torchweft.optim.local import GroupPart, LocalOptimizer, step_optimizer

COMPILER = "torch._dynamo"
STEPS = 3


class GradModes(SGD):
    """Records whether gradients were enabled within its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modes: list[bool] = []

    def _init_group(self, *args: Any) -> Any:
        self.modes.append(torch.is_grad_enabled())
        return super()._init_group(*args)  # type: ignore[no-untyped-call]


class OwnStep(Adam):
    """Overrides ``step`` and calls that of its base."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] *= 0.5
        super().step(closure)


class OwnGroups(SGD):
    """Changes each group that it is given."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group["lr"] = 0.25
        super().add_param_group(param_group)


class Made(SGD):
    """Overrides ``__new__``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Made:
        made = super().__new__(cls)
        made.tag = len(args)  # type: ignore[attr-defined]
        return made


class ByMetaclass(SGD, abc.ABC):
    """Has another metaclass."""


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(2)]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 2, generator=generator) for _ in range(2)]


def stepped_by_torch(kind: type[Optimizer], options: dict[str, Any]) -> Any:
    held = parameters()
    groups = [{"params": held[:1]}, {"params": held[1:], "lr": 0.5}]
    first = 1 if takes_more(kind) else 2
    optimizer = kind(iter(groups[:first]), **options)  # type: ignore[call-arg]
    for group in groups[first:]:
        optimizer.add_param_group(group)
    for step in range(STEPS):
        for parameter, gradient in zip(held, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return held, optimizer.state_dict()


def stepped_by_weft(kind: type[Optimizer], options: dict[str, Any]) -> Any:
    held = parameters()
    made: list[Optimizer] = []

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        made.append(kind(iter(groups), **options))  # type: ignore[call-arg]
        return made[0]

    def part(number: int, **own: Any) -> GroupPart:
        return GroupPart(number, own, [number], [reference(0, number, held[number])])

    parts = [part(0), part(1, lr=0.5)]
    first = 1 if takes_more(kind) else 2
    local = LocalOptimizer(make, parts[:first], new_guard())
    local.add(parts[first:])
    for step in range(STEPS):
        if step == 1:  # continues from its saved state
            local.load(local.save({}))
        local.step(dict(zip(held, gradients(step), strict=True)), {})
    return held, made[0].state_dict()


def takes_more(kind: type[Optimizer]) -> bool:
    """Returns whether groups can be added later; PyTorch 2.6's Adagrad makes no state for them."""
    return not issubclass(kind, Adagrad)


def flat(value: Any) -> Any:
    """Returns a value with its tensors as bytes, to be compared bit by bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), bytes(value.detach().numpy().tobytes())
    if isinstance(value, dict):
        return {key: flat(entry) for key, entry in value.items()}
    return [flat(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def plain_kinds() -> list[type[Optimizer]]:
    """Returns all optimizers of PyTorch that step dense parameters with given gradients."""
    left_out = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
    return [
        kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in left_out
    ]


def check_modes_and_hooks() -> None:
    seen: list[str] = []
    [held, _] = parameters()
    held.grad = torch.ones(3, 2)
    for differentiable in (False, True):
        options = {"lr": 0.1, "differentiable": differentiable}
        optimizer = GradModes([held], **options)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        if differentiable:
            with pytest.raises(RuntimeError, match="in-place"):  # a leaf that requires grad
                step_optimizer(optimizer)
        else:
            step_optimizer(optimizer)
            assert seen == ["before", "after"]
        assert optimizer.modes == [differentiable]
        assert torch.is_grad_enabled()
    assert seen == ["before", "after", "before"]


def check_step_of_an_object() -> None:
    [held, _] = parameters()
    optimizer = SGD([held], 0.1)
    calls: list[str] = []
    optimizer.step = lambda: calls.append("own")  # type: ignore[method-assign, assignment, misc]
    step_optimizer(optimizer)
    assert calls == ["own"]


def main() -> None:
    """Runs all checks; raises if one fails."""
    kinds = plain_kinds()
    assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop"} <= {kind.__name__ for kind in kinds}
    options: dict[Callable[..., Any], dict[str, Any]] = {SGD: {"lr": 0.1, "momentum": 0.9}}
    ours = {kind: flat(stepped_by_weft(kind, options.get(kind, {}))) for kind in kinds}
    check_modes_and_hooks()
    check_step_of_an_object()
    assert COMPILER not in sys.modules, "an optimizer has imported PyTorch's compiler"

    # A step of the program's own is that of PyTorch, which imports the compiler.
    special = {kind: {"lr": 0.1} for kind in (OwnGroups, Made, ByMetaclass, OwnStep)}
    for kind, own in special.items():
        ours[kind] = flat(stepped_by_weft(kind, own))
    assert COMPILER in sys.modules
    for kind, result in ours.items():
        expected = flat(stepped_by_torch(kind, {**options.get(kind, {}), **special.get(kind, {})}))
        assert result == expected, f"{kind.__name__} differs"
        again = flat(stepped_by_weft(kind, {**options.get(kind, {}), **special.get(kind, {})}))
        assert again == expected, f"{kind.__name__} differs with the compiler imported"
    print("as PyTorch's:", len(ours))


if __name__ == "__main__":
    main()
