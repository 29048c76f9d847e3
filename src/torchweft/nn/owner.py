"""Functions that run on the worker where a module lives; other workers call them by name.

A strict worker serves modules that ``create`` made here. It calls any other module only if its
class exposes ``forward``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torchweft.engine.codec.registry import is_exposed, rebuilds_plain, remotely_callable
from torchweft.engine.worker.agent import Slot
from torchweft.engine.worker.calls import current_call
from torchweft.engine.worker.current import current
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.rpc import RRef
from torchweft.rpc.serving import (
    WhenReady,
    check_called,
    check_types,
    method_of,
    owned,
    refuse,
    serves_another_strictly,
)

HOST = "cpu"

EXPECTED = "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>"
"""The start of the error for any other class, as in ``torch.distributed.nn``."""


@rebuilds_plain
class Step(NamedTuple):
    """A call of a chain: ``function(previous result, *args, **kwargs)``.

    The function may be a reference to a callable value of the owner.
    """

    function: Callable[..., Any] | RRef[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@remotely_callable
def create(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> RRef[nn.Module]:
    """Makes a module on this worker and returns a reference to it."""
    if serves_another_strictly():
        check_called(module_cls)
        check_types(args=(args, tuple), kwargs=(kwargs, dict))
        _check_device(device)
    served = current_call.get()
    if served is not None:
        served.function = module_cls
    module = make(module_cls, args, kwargs, device)
    _made()[module] = None
    return RRef(module)


@remotely_callable
def duplicate(module: RRef[nn.Module]) -> RRef[nn.Module]:
    """Makes a deep copy of a module on this worker and returns a reference to it."""
    made = copy.deepcopy(_module(module))
    _made()[made] = None
    return RRef(made)


def make(
    module_cls: Callable[..., nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> nn.Module:
    """Makes a module on a device of this worker.

    Raises:
        ArgumentTypeError: ``module_cls`` did not return a module.
        ConfigurationError: This worker has no such device.
    """
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        name = getattr(module_cls, "__qualname__", repr(module_cls))
        raise ArgumentTypeError(f"{EXPECTED}, but {name} returned a {type(module).__name__}")
    if device == HOST:
        return module
    try:
        return module.to(device)
    except (AssertionError, RuntimeError) as error:
        if device_is_there(device):
            raise
        raise ConfigurationError(
            f"worker {current().info.name!r} has no device {device!r} ({error}); name one that it "
            "has after the slash of remote_device"
        ) from None


def device_is_there(device: str) -> bool:
    """Returns whether this worker can make tensors on a device."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError):
        return False
    return True


@remotely_callable
def run(
    creator: int,
    owner: int,
    number: int,
    kept: object,
    device: str,
    steps: Sequence[Step] | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> WhenReady:
    """Calls a module of this worker, and passes the result through the steps of a chain.

    Takes the parts of the reference to the module, as the functions of ``torchweft.rpc.serving``.
    """
    module = owned((creator, owner, number))
    return WhenReady(module, lambda value: (run, _run(value, device, steps, args, kwargs)), kept)


def _run(
    module: nn.Module,
    device: str,
    steps: Sequence[Step] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    steps = () if steps is None else steps
    is_strict = serves_another_strictly()
    if is_strict:
        _check_device(device)
        check_types(steps=(steps, tuple))
    call = _callable(module, is_strict)
    served = current_call.get()
    if served is not None:  # Reports name what the program has written.
        served.function = module.forward if isinstance(module, nn.Module) else call
    value = call(*to_device(args, device), **to_device(kwargs, device))
    for step in steps:
        if is_strict:
            check_types(step=(step, Step), args=(step.args, tuple), kwargs=(step.kwargs, dict))
        function = step.function
        if isinstance(function, RRef):
            target = _callable(function.local_value(), is_strict)
        else:
            check_called(function)
            target = function
        value = target(value, *to_device(step.args, device), **to_device(step.kwargs, device))
    if device != HOST and _is_answered_on_host():
        return _to_host(value)
    return value


def _is_answered_on_host() -> bool:
    """Returns whether the result goes to a caller to which no tensor on a GPU can be sent.

    As in ``torch.distributed.nn``, the caller of such a module need not map devices.
    """
    served: Any = current_call.get()
    is_kept = served is None or served.owned is not None
    return not is_kept and bool(served.peer.device_maps.answers_on_host)


def _callable(value: Any, is_strict: bool) -> Callable[..., Any]:
    """Returns the callable for a module or other value of this worker; checks permission."""
    if is_strict and isinstance(value, nn.Module):
        if value not in _made():
            _check_declares_forward(value)
        return value
    call: Callable[..., Any] = method_of(value, "__call__")
    return call


def _check_declares_forward(module: nn.Module) -> None:
    kind = type(module)
    home = next((base for base in kind.__mro__ if "forward" in vars(base)), None)
    if home is None or not is_exposed(vars(home)["forward"]):
        name = f"{kind.__module__}.{kind.__qualname__}"
        refuse(f"call a {name}", f"no RemoteModule made it; {ADVICE}")


ADVICE = "make it by RemoteModule, or put @rpc.expose above forward of its class"


def _check_device(device: Any) -> None:
    check_types(device=(device, str))
    if torch.device(device).type not in _DEVICES:
        refuse(f"use device {device!r}", f"it takes {', '.join(_DEVICES)}")


_DEVICES = ("cpu", "cuda", "xpu", "mps")


_MADE: Slot[WeakIdKeyDictionary] = Slot(WeakIdKeyDictionary)
"""The modules that ``create`` made on one worker, as keys, by identity."""


def _made() -> WeakIdKeyDictionary:
    return current().slots[_MADE]


def _module(reference: Any) -> nn.Module:
    """Returns the module behind the argument of an entry point below.

    Raises:
        ArgumentTypeError: The argument is not a reference to a module.
        NotAllowed: Another worker calls, this one is strict, and no RemoteModule made the module.
    """
    check_types(module=(reference, RRef))
    module = reference.local_value()
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"{reference!r} refers to a {type(module).__name__}, and not to a module"
        )
    if serves_another_strictly() and module not in _made():
        kind = type(module)
        refuse(
            f"do this to a {kind.__module__}.{kind.__qualname__}",
            "no RemoteModule made it; make it by RemoteModule, or call a function that does it "
            "(@rpc.register)",
        )
    return module


def to_device(value: Any, device: str) -> Any:
    """Returns ``value`` with the CPU tensors in lists, tuples and dicts moved to ``device``."""
    if device == HOST:
        return value
    return _moved(value, lambda each: each.to(device) if each.device.type == HOST else each)


def _to_host(value: Any) -> Any:
    """Returns ``value`` with the tensors in lists, tuples and dicts moved to the CPU."""
    return _moved(value, Tensor.cpu)


def _moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` with the tensors in lists, tuples and dicts moved."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, dict):
        return {key: _moved(item, move) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_moved(item, move) for item in value)
    return value


@remotely_callable
def parameters(module: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    """Returns references to the parameters of a module of this worker."""
    check_types(recurse=(recurse, bool))
    return [RRef(parameter) for parameter in _module(module).parameters(recurse)]


@remotely_callable
def set_training(module: RRef[nn.Module], mode: bool) -> None:
    """Switches a module of this worker between training and evaluation."""
    check_types(mode=(mode, bool))
    _module(module).train(mode)


@remotely_callable
def set_requires_grad(module: RRef[nn.Module], requires_grad: bool) -> None:
    """Freezes a module of this worker, or has it learn again."""
    check_types(requires_grad=(requires_grad, bool))
    _module(module).requires_grad_(requires_grad)


@remotely_callable
def convert(module: RRef[nn.Module], function: Callable[[Tensor], Tensor], recurse: bool) -> None:
    """Replaces the tensors of a module of this worker by what a function makes of them.

    Raises:
        ConfigurationError: The function moves them to another device.
        NotAllowed: Another worker calls, and this one is strict.
    """
    if serves_another_strictly():
        refuse("convert a module", "have the function that makes it return it in this form")
    target = _module(module)
    with torch.no_grad():
        for tensor in (*target.parameters(recurse), *target.buffers(recurse)):
            device = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
            if device != tensor.device:
                raise ConfigurationError(
                    f"a RemoteModule stays on device '{tensor.device}' of worker "
                    f"{current().info.name!r}, and does not move to '{device}' with the module "
                    "around it: move the local parts alone, and name the device of the other "
                    f"when it is made, as in RemoteModule('worker/{device}', ...)"
                )
    target._apply(function, recurse)  # type: ignore[no-untyped-call]


@remotely_callable
def apply(module: RRef[nn.Module], function: Callable[[nn.Module], None]) -> None:
    """Applies a function to a module of this worker and all its submodules."""
    check_called(function)
    _module(module).apply(function)


@remotely_callable
def load_state(
    module: RRef[nn.Module], state: Mapping[str, Tensor], assign: bool = False
) -> tuple[list[str], list[str], str]:
    """Loads a possibly partial state into a module of this worker.

    Args:
        module: The module.
        state: The state.
        assign: Whether its tensors replace those of the module, instead of being copied into them.

    Returns:
        The missing keys, the unexpected keys, and the error text for all others.
    """
    target = _module(module)
    if serves_another_strictly():
        check_types(state=(state, dict), assign=(assign, bool))
        for key, value in state.items():
            check_types(key=(key, str), value=(value, Tensor))
        state = dict(state)  # Drops attributes of the dict, such as ``_metadata``.
    try:
        missing, unexpected = target.load_state_dict(state, strict=False, assign=assign)
    except RuntimeError as error:
        return [], [], str(error)
    return list(missing), list(unexpected), ""


@remotely_callable
def state(module: RRef[nn.Module], prefix: str) -> dict[str, Any]:
    """Returns the state of a module of this worker, with ``prefix`` before each key."""
    check_types(prefix=(prefix, str))
    with torch.no_grad():
        return _module(module).state_dict(prefix=prefix)
