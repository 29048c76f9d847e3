"""Decorators for functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from torchweft.rpc.batching.decorator import batch_statistics, batched, expect_calls
from torchweft.rpc.batching.statistics import BatchStatistics

__all__ = ["BatchStatistics", "async_execution", "batch_statistics", "batched", "expect_calls"]

P = ParamSpec("P")
T = TypeVar("T")
_MARK = "_wrapped_async_rpc_function"


def async_execution(
    function: Callable[P, torch.futures.Future[T]],
) -> Callable[P, torch.futures.Future[T]]:
    """Marks a function that returns a future, whose value is then the result of the remote call.

    The call is answered when the future completes; until then it holds no thread of the callee.
    With ``@staticmethod`` or ``@classmethod`` this decorator is the inner one. A local call
    returns the future unchanged.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> torch.futures.Future[T]:
        return function(*args, **kwargs)

    setattr(wrapper, _MARK, function)
    if isinstance(function, torch.jit.ScriptFunction):
        _name_after(wrapper, function)
    return wrapper


def _name_after(wrapper: Any, function: Any) -> None:
    """Gives a wrapper the name of a compiled function in its source, so that it is found there."""
    qualified = str(function.qualified_name).removeprefix("__torch__.")
    module, _, name = qualified.rpartition(".")
    wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module or "__main__", name, name


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Whether ``async_execution`` marked the function."""
    return hasattr(function, _MARK)
