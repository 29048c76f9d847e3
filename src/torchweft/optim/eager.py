"""Makes and steps PyTorch's optimizers without an import of its compiler.

``torch.optim.Optimizer`` imports ``torch._dynamo`` when its first parameter group is added, and
again in each step, only to tell the compiler what it may not trace. The import costs more than a
second of CPU, and memory, in each process that hosts an optimizer. In a process that has not
imported the compiler, there is no compiler to tell. There the functions below call the functions
that PyTorch wrapped. Otherwise, or if this module does not know the wrapper, they call PyTorch's
functions unchanged.

Each step of PyTorch also names itself to profilers and runs hooks. That takes longer than the step
of a small layer, also where there is no profiler and no hook. So it is left out then.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import CodeType, MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer, optimizer

from torchweft.autograd.refusals import OWN_HOOKS
from torchweft.rpc.rref import is_made_plainly

_COMPILER = "torch._dynamo"

P = ParamSpec("P")
T = TypeVar("T")


def make(
    optimizer_class: type[Optimizer], groups: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Optimizer:
    """Returns ``optimizer_class(groups, *args, **kwargs)``."""
    add = _unmarked(optimizer_class.add_param_group)
    if add is None or not is_made_plainly(optimizer_class):
        return optimizer_class(groups, *args, **kwargs)
    made = optimizer_class.__new__(optimizer_class)
    # The constructor finds an attribute of the object before the method of the class.
    vars(made)["add_param_group"] = MethodType(add, made)
    try:
        optimizer_class.__init__(made, groups, *args, **kwargs)
    finally:
        vars(made).pop("add_param_group", None)
    return made


def call(optimizer: Optimizer, method: str, *args: Any) -> Any:
    """Calls a method that torch marks for its compiler, such as ``state_dict`` or ``zero_grad``."""
    if method not in vars(optimizer):
        plain = _unmarked(getattr(type(optimizer), method))
        if plain is not None:
            return plain(optimizer, *args)
    return getattr(optimizer, method)(*args)


def step(optimizer: Optimizer) -> None:
    """Steps an optimizer once, with the gradients that its parameters have."""
    if "step" not in vars(optimizer):  # Schedulers put their wrapper there.
        plain = _plain_step(type(optimizer).step)
        if plain is not None:
            plain(optimizer)
            return
    optimizer.step()


def with_hooks(step: Callable[P, T]) -> Callable[P, T]:
    """Does what PyTorch does to the ``step`` of each class of optimizers, if it has any effect."""
    seen: Callable[P, T] = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (seen if _is_seen(args[0]) else step)(*args, **kwargs)

    vars(call)["hooked"] = True  # PyTorch's own mark: it does not wrap this function once more.
    return call


def _is_seen(optimizer: Any) -> bool:
    return bool(
        torch._C._autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(_GLOBAL_HOOKS[0]) > len(OWN_HOOKS)
        or _GLOBAL_HOOKS[1]
    )


_GLOBAL_HOOKS: list[Any] = [
    getattr(optimizer, name, ())
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
]


def _unmarked(function: Any) -> Callable[..., Any] | None:
    """Returns the function inside a mark for the compiler; None if the mark must stay."""
    if _COMPILER in sys.modules or _code_of(function) is not _MARK:
        return None
    unmarked: Callable[..., Any] = function.__wrapped__
    return unmarked


def _plain_step(step: Any) -> Callable[[Optimizer], object] | None:
    """Returns a class's step without marks, but with its hooks and grad mode; None if unknown."""
    if _COMPILER in sys.modules or _code_of(step) is not _HOOKS:
        return None
    marked = step.__wrapped__
    if _code_of(marked) is not _MARKED_STEP:
        return None
    known = _plain_steps.get(step)
    if known is None:
        known = with_hooks(_in_its_mode(marked.__wrapped__))
        _plain_steps[step] = known
    return known


def _in_its_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a step to run with gradients enabled only if the optimizer is differentiable."""

    @functools.wraps(step)
    def in_mode(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return step(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return in_mode


def _code_of(function: object) -> object:
    return getattr(function, "__code__", None)


def _code_made_by(decorator: Any, names: str) -> object:
    """Returns the code of a decorator's wrappers, if they use no names except ``names``.

    Otherwise returns an object that equals no code: a version of PyTorch whose wrappers do more
    keeps them.
    """
    try:
        code: CodeType = decorator(lambda *_: None).__code__
    except (AttributeError, TypeError):  # This version of PyTorch has no such decorator.
        return object()
    return code if set(code.co_names) <= set(names.split()) else object()


_plain_steps: weakref.WeakKeyDictionary[Any, Callable[[Optimizer], object]] = (
    weakref.WeakKeyDictionary()
)

_HOOKS = _code_of(Optimizer.profile_hook_step(lambda _: None))
_MARK = _code_made_by(
    getattr(torch, "_disable_dynamo", None),
    "getattr __dynamo_disable torch torch._dynamo _dynamo disable",
)
_MARKED_STEP = _code_made_by(
    getattr(optimizer, "_use_grad_for_differentiable", None),
    "cast Optimizer torch torch._dynamo _dynamo graph_break is_grad_enabled set_grad_enabled "
    "defaults",
)
