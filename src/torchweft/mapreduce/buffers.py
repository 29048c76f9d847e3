"""Buffers that a map changes in modules, such as BatchNorm's running statistics.

A part computes with a copy of the caller's module, and what the module keeps in buffers changes in
the copy. So the first part of a map returns the buffers that it has changed, and the caller's
modules get them when the map completes. As under ``DistributedDataParallel``, the buffers of the
other parts are dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft import extending
from torchweft.mapreduce import trees
from torchweft.rpc import functions

_WANTED = "torchweft buffers"
"""The keyword argument, which no function can have, of the part that returns its buffers."""

Changed = tuple[int, str, Tensor]
"""The number of a module among those of the part, the name of its buffer, and the new value."""


class Outcome(NamedTuple):
    """What the first part returns.

    Attributes:
        result: The result of the function.
        changed: The buffers that it has changed.
    """

    result: Any
    changed: list[Changed]


class Buffers:
    """The buffers of the modules that the first part of a map gets.

    Args:
        function: The function of the map.
        args: Positional arguments of the first part.
        kwargs: Keyword arguments of the first part.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._modules = _modules_in(function, args, kwargs)
        self.are_any = any(True for module in self._modules for _ in module.buffers())
        if self.are_any and functions.is_async_execution(function):
            self.are_any = False
            if any(module.training for module in self._modules):
                name = extending.function_name(function)
                warnings.warn(
                    f"{name} is an async_execution function, so the buffers of "
                    "modules that it changes in a map, such as BatchNorm's, are dropped; call a "
                    "function without that decorator, or model.eval() first",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function to run for each part."""
        return partial(_run, function) if self.are_any else function

    def wanted_with(self, kwargs: Any) -> Any:
        """Returns the keyword arguments of the part that is to return its buffers."""
        return {**(kwargs or {}), _WANTED: True} if self.are_any else kwargs

    def update(self, changed: Sequence[Changed]) -> None:
        """Gives the caller's modules the values that the first part has left."""
        for number, name, value in changed:
            place, _, leaf = name.rpartition(".")
            owner = self._modules[number].get_submodule(place)
            buffer = getattr(owner, leaf, None)
            if (
                isinstance(buffer, Tensor)
                and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
                and not buffer.is_inference()
            ):
                # Not counted as an in-place change, as those of BatchNorm itself are not.
                buffer.data.copy_(value)
            else:
                setattr(owner, leaf, value)


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program's function behind the one that ``Buffers.watched`` returned."""
    if isinstance(function, partial) and function.func is _run:
        watched: Callable[..., Any] = function.args[0]
        return watched
    return function


def _run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs a part; the first returns an ``Outcome``."""
    if not kwargs.pop(_WANTED, False):
        return function(*args, **kwargs)
    modules = _modules_in(function, args, kwargs)
    before = {key: (buffer, buffer.detach().clone()) for key, buffer in _buffers_of(modules)}
    result = function(*args, **kwargs)

    def outcome(result: Any) -> Outcome:
        changed = [
            (*key, buffer.detach())
            for key, buffer in _buffers_of(modules)
            if key not in before or not _is_same(buffer, *before[key])
        ]
        return Outcome(result, changed)

    async def awaited(coroutine: Any) -> Outcome:
        return outcome(await coroutine)

    return awaited(result) if isinstance(result, CoroutineType) else outcome(result)


def _buffers_of(modules: Sequence[nn.Module]) -> list[tuple[tuple[int, str], Tensor]]:
    return [
        ((number, name), buffer)
        for number, module in enumerate(modules)
        for name, buffer in module.named_buffers()
        if not buffer.requires_grad
    ]


def _is_same(buffer: Tensor, earlier: Tensor, content: Tensor) -> bool:
    if buffer is not earlier and (buffer.shape, buffer.dtype) != (content.shape, content.dtype):
        return False
    return torch.equal(buffer, content)


def _modules_in(function: Any, args: Any, kwargs: Any) -> list[nn.Module]:
    """Returns the modules that a function gets, each once, in the same order on all workers."""
    given = [args, kwargs]
    while isinstance(function, partial):
        given += [function.args, function.keywords]
        function = function.func
    given += [function, getattr(function, "__self__", None)]
    found = [leaf for leaf in trees.leaves(given) if isinstance(leaf, nn.Module)]
    return list({id(module): module for module in found}.values())
