"""Marks for functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_MARK = "_wrapped_async_rpc_function"


def async_execution(
    function: Callable[..., torch.futures.Future[T]],
) -> Callable[..., torch.futures.Future[T]]:
    """Marks a function that returns a future, whose value is then the result of the remote call.

    The call is answered when the future completes; until then it holds no thread of the callee.
    With ``@staticmethod`` or ``@classmethod`` this decorator goes on the inside. Called locally,
    the function returns its future as it is.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> torch.futures.Future[T]:
        return function(*args, **kwargs)

    setattr(wrapper, _MARK, function)
    return wrapper


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Whether ``async_execution`` marked the function."""
    return hasattr(function, _MARK)
