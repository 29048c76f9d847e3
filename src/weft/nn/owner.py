"""What runs on the worker where a module lives; others ask for it by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.agent.current import current
from weft.agent.references import ReferenceKeeper
from weft.errors import ArgumentTypeError
from weft.ids import ReferenceId
from weft.rpc import RRef
from weft.rpc.outcomes import WhenReady
from weft.rpc.serving import method_of

HOST = "cpu"

EXPECTED = "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>"
"""How the refusal of anything else begins, as in ``torch.distributed.nn``."""


class Step(NamedTuple):
    """A call of a chain: ``function(what came before, *args, **kwargs)``.

    The function may be a reference to something of the owner that can be called.
    """

    function: Callable[..., Any] | RRef[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def create(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> RRef[nn.Module]:
    """Makes a module on this worker and returns a reference to it."""
    return RRef(make(module_cls, args, kwargs, device))


def make(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> nn.Module:
    """Makes a module on a device of this worker.

    Raises:
        ArgumentTypeError: What ``module_cls`` made is no module.
    """
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        name = getattr(module_cls, "__qualname__", repr(module_cls))
        raise ArgumentTypeError(f"{EXPECTED}, but {name} returned a {type(module).__name__}")
    return module if device == HOST else module.to(device)


def run(
    module: RRef[nn.Module],
    device: str,
    steps: Sequence[Step],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a module of this worker, and passes the result through the steps of a chain."""
    return _run(module.local_value(), device, steps, args, kwargs)


def run_at(
    address: tuple[int, int, int],
    device: str,
    steps: Sequence[Step],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> WhenReady:
    """Does what ``run`` does, for a caller who holds a reference to the module meanwhile.

    That saves counting one more reference in every call.
    """
    keeper: ReferenceKeeper = current().part(ReferenceKeeper)
    owned = keeper.value_of(ReferenceId(*address))
    return WhenReady(owned, lambda module: (run_at, _run(module, device, steps, args, kwargs)))


def _run(
    module: nn.Module,
    device: str,
    steps: Sequence[Step],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    call = method_of(module, "__call__")
    value = call(*to_device(args, device), **to_device(kwargs, device))
    for step in steps:
        function = step.function
        if isinstance(function, RRef):
            target = method_of(function.local_value(), "__call__")
        else:
            target = function
        value = target(value, *to_device(step.args, device), **to_device(step.kwargs, device))
    return value


def to_device(value: Any, device: str) -> Any:
    """Returns ``value`` with the CPU tensors in lists, tuples and dicts moved to ``device``."""
    if device == HOST:
        return value
    if isinstance(value, Tensor):
        return value.to(device) if value.device.type == HOST else value
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(to_device(item, device) for item in value)
    return value


def parameters(module: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    """Returns references to the parameters of a module of this worker."""
    return [RRef(parameter) for parameter in module.local_value().parameters(recurse)]


def set_training(module: RRef[nn.Module], mode: bool) -> None:
    """Switches a module of this worker between training and evaluation."""
    module.local_value().train(mode)


def apply(module: RRef[nn.Module], function: Callable[[nn.Module], None]) -> None:
    """Applies a function to a module of this worker and all its submodules."""
    module.local_value().apply(function)


def load_state(
    module: RRef[nn.Module], state: Mapping[str, Tensor]
) -> tuple[list[str], list[str], str]:
    """Loads what there is of a state into a module of this worker.

    Returns:
        The missing and the unexpected keys, and what was wrong with the others.
    """
    target = module.local_value()
    try:
        missing, unexpected = target.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return [], [], str(error)
    return list(missing), list(unexpected), ""


def state(module: RRef[nn.Module], prefix: str) -> dict[str, Any]:
    """Returns the state of a module of this worker, with ``prefix`` before each key."""
    with torch.no_grad():
        return module.local_value().state_dict(prefix=prefix)
