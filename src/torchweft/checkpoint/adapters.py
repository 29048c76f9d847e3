"""The kinds of values that a snapshot can hold, and how each kind is copied and put back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.checkpoint.plain import HostCopier
from torchweft.errors import ArgumentTypeError

MODULE, TENSOR, GENERATOR, OBJECT = "module", "tensor", "generator", "object"
DATA = "data"
"""A dict or list behind a reference: its content is replaced, and it stays the same object."""
VALUE = "value"
"""A plain value of the driver's state: the content of a dict or list is replaced; any other value
is itself replaced in the state."""


class Differences(NamedTuple):
    """How a saved entry differs from its restore target; each difference with its path."""

    missing: list[str]
    unexpected: list[str]
    differing: list[str]


def kind_of(path: str, value: Any, *, is_remote: bool) -> str:
    """Returns the kind of a value.

    Args:
        path: Its path in the state, for messages.
        value: A value of this worker.
        is_remote: Whether the state has a reference to it, rather than the value itself.

    Raises:
        ArgumentTypeError: Such a value cannot be restored.
    """
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, Tensor):
        return TENSOR
    if isinstance(value, torch.Generator):
        return GENERATOR
    if callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    ):
        return OBJECT
    if not is_remote:
        return VALUE
    if isinstance(value, (dict, list)):
        return DATA
    raise ArgumentTypeError(
        f"{path} is a reference to a {type(value).__name__}, which cannot be changed in place when "
        "it is restored; refer to a module, a tensor, a dict, a list, a torch.Generator or "
        "something with state_dict and load_state_dict"
    )


def take(path: str, kind: str, value: Any) -> Any:
    """Returns a copy of the state of a value: tensors in host memory, and plain values.

    Raises:
        ArgumentTypeError: The state contains an object of another type; says where.
    """
    copier = HostCopier(path)
    if kind == MODULE:
        with torch.no_grad():
            state = value.state_dict()
        metadata = dict(getattr(state, "_metadata", {}))
        return {"state": copier.copy(dict(state)), "metadata": copier.copy(metadata)}
    if kind == GENERATOR:
        return value.get_state().cpu()
    return copier.copy(value.state_dict() if kind == OBJECT else value)


def differences(path: str, kind: str, value: Any, state: Any) -> Differences:
    """Returns the differences that prevent putting a saved state into a value.

    An object with ``load_state_dict`` checks its state itself, when it loads it.
    """
    if kind == TENSOR and value.shape != state.shape:
        return Differences([], [], [_shapes(path, state, value)])
    if kind != MODULE:
        return Differences([], [], [])
    saved = state["state"]
    with torch.no_grad():
        present = value.state_dict()
    return Differences(
        [f"{path}:{key}" for key in present if key not in saved],
        [f"{path}:{key}" for key in saved if key not in present],
        [
            _shapes(f"{path}:{key}", saved[key], present[key])
            for key in present
            if key in saved and _is_of_another_shape(saved[key], present[key])
        ],
    )


def put(kind: str, value: Any, state: Any, *, strict: bool) -> None:
    """Puts a saved state into a value.

    Args:
        kind: The kind of the value.
        value: The value; it stays the same object.
        state: The result of ``take`` for such a value.
        strict: Whether a module must have exactly the keys that the state has.
    """
    with torch.no_grad():
        if kind == MODULE:
            _put_module(value, state, strict=strict)
        elif kind == TENSOR:
            value.copy_(state)
        elif kind == GENERATOR:
            value.set_state(state)
        elif kind == OBJECT:
            value.load_state_dict(state)
        else:
            refill(value, state)


def refill(value: Any, state: Any) -> None:
    """Replaces the content of a dict or list, which stays the same object."""
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    else:
        value[:] = state


def _put_module(module: nn.Module, state: Any, *, strict: bool) -> None:
    loaded: Any = OrderedDict(state["state"])
    loaded._metadata = OrderedDict(state["metadata"])  # versions, which some modules check
    module.load_state_dict(loaded, strict=strict)


def _is_of_another_shape(saved: Any, present: Any) -> bool:
    if not isinstance(saved, Tensor) or not isinstance(present, Tensor):
        return False
    if nn.parameter.is_lazy(present):  # It has no shape before it is used or loaded.
        return False
    return saved.shape != present.shape


def _shapes(path: str, saved: Tensor, present: Tensor) -> str:
    return f"{path} has shape {tuple(saved.shape)} in the snapshot and {tuple(present.shape)} here"
