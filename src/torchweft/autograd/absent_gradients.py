"""Refuses functions of PyTorch that would find no gradient, since it is elsewhere.

The steps of optimizers and ``torch.nn.utils.clip_grad_norm_`` read ``.grad``, and leave out
parameters without one. But a pass in a context leaves gradients in the context, and a model that
was handed to other workers gets them there. Then these functions would do nothing, and say nothing.

Each kind of place adds a check, which raises where gradients are elsewhere. Contexts are looked at
only where no parameter has a gradient in ``.grad``: then the function can have no effect.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import utils
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchweft.autograd.contexts import Contexts
from torchweft.autograd.replacing import replace
from torchweft.errors import ConfigurationError

Check = Callable[[str, Sequence[Tensor]], object]
"""Raises if gradients of parameters are elsewhere. It gets the name of the function that reads
them: that of a class of optimizers, or of a function of ``torch.nn.utils``."""


class Holder(Protocol):
    """A worker with contexts."""

    contexts: Contexts


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_checks: list[Check] = []
_fed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
OWN_HOOKS: list[Any] = []
"""The hook of all optimizers. It stays: a step must not change its hooks."""


def watch(holder: Holder) -> None:
    """Looks for gradients in a worker's contexts from now on, for as long as ``holder`` lives."""
    _holders.add(holder)
    _begin()


def add_check(check: Check) -> None:
    """Calls a check from now on, before gradients are read."""
    if check not in _checks:
        _checks.append(check)
    _begin()


def leave_out(optimizer: Optimizer) -> None:
    """Does not look at the steps of an optimizer, which Weft gives the gradients that there are."""
    _fed.add(optimizer)


def _begin() -> None:
    if not OWN_HOOKS:
        OWN_HOOKS.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    # With a closure, or the number of a context, gradients come from elsewhere.
    if len(args) > 1 or options or optimizer in _fed:
        return
    groups = [group["params"] for group in optimizer.param_groups]
    _look(type(optimizer).__name__, [each for group in groups for each in group])


def _reading_grad(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(parameters: Any, *args: Any, **options: Any) -> Any:
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _look(name, found)
        # torch warns of a generator that yields nothing.
        return function(found or parameters, *args, **options)

    return call


def _measuring(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(tensors: Any, *args: Any, **options: Any) -> Any:
        found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not found and any(_contexts_with_gradients()):
            warnings.warn(
                "get_total_norm was called without gradients, and there are gradients in an "
                "autograd context: torchweft.autograd.get_gradients(context_id) has them",
                RuntimeWarning,
                stacklevel=2,
            )
        return function(found, *args, **options)

    return call


for _name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
    _function = getattr(utils, _name)
    replace(_function, _reading_grad(_function, _name), _name)
replace(utils.get_total_norm, _measuring(utils.get_total_norm), "get_total_norm")


def _look(name: str, parameters: Iterable[Any]) -> None:
    tensors = [each for each in parameters if isinstance(each, Tensor)]
    for check in _checks:
        check(name, tensors)
    if any(each.grad is not None for each in tensors):
        return
    for context_id, has_gradient in _contexts_with_gradients():
        if any(map(has_gradient, tensors)):
            raise ConfigurationError(
                f"{name} finds no gradient: those of its parameters are in autograd context "
                f"{context_id}. {_instead(name)}, or call torchweft.autograd.backward(loss) "
                "outside of contexts, which adds to .grad"
            )


def _contexts_with_gradients() -> list[tuple[int, Callable[[Tensor], bool]]]:
    contexts = [context for holder in list(_holders) for context in holder.contexts.all()]
    return [(each.id, each.gradients.has) for each in contexts if each.gradients.has_any]


def _instead(name: str) -> str:
    if name == "clip_grad_norm_":
        return (
            "Call torchweft.optim.clip_grad_norm_(context_id, references, max_norm), with RRefs "
            "to the parameters"
        )
    if name.startswith("clip_"):
        return "Change the tensors of torchweft.autograd.get_gradients(context_id) in place"
    return (
        f"Use torchweft.optim.DistributedOptimizer({name}, references), with RRefs to the "
        "parameters, and its step(context_id)"
    )
