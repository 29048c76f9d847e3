"""Decorators for functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from torchweft.deferred import import_name
from torchweft.rpc.proxies import LIMIT_MARK
from torchweft.rpc.serving import ASYNC_MARK

if TYPE_CHECKING:
    from torchweft.rpc.batching import BatchStatistics, batch_statistics, batched, expect_calls

__all__ = [
    "BatchStatistics",
    "async_execution",
    "batch_statistics",
    "batched",
    "expect_calls",
    "is_async_execution",
    "timeout",
]

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])
_OF_BATCHES = frozenset(__all__) - {"async_execution", "is_async_execution", "timeout"}
"""Imported by programs that batch calls."""


def __getattr__(name: str) -> Any:
    if name not in _OF_BATCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_name(__name__, name, "torchweft.rpc.batching")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def async_execution(
    fn: Callable[P, torch.futures.Future[T]],
) -> Callable[P, torch.futures.Future[T]]:
    """Marks a function that returns a future, whose value is then the result of the remote call.

    The call is answered when the future completes; until then it holds no thread of the callee.
    With ``@staticmethod`` or ``@classmethod`` this decorator is the inner one. A local call
    returns the future unchanged.
    """

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> torch.futures.Future[T]:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, fn)
    if isinstance(fn, torch.jit.ScriptFunction):
        _name_after(wrapper, fn)
    return wrapper


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Returns whether ``async_execution`` has marked a function."""
    return hasattr(function, ASYNC_MARK)


def timeout(seconds: float) -> Callable[[M], M]:
    """Sets the time limit of a method, for calls by a reference that have no ``timeout``.

    It holds where the caller knows the method: in calls by ``rpc.on`` and ``rpc.actors``, and by a
    reference that this worker has made with the class. Elsewhere the worker's ``rpc_timeout`` does.
    The outermost decorator of the method.

    Args:
        seconds: The limit of each call; 0 for none.

    Example::

        class Simulator:
            @functions.timeout(600)
            def run(self, steps: int) -> Result: ...
    """

    def limited(method: M) -> M:
        setattr(method, LIMIT_MARK, seconds)
        return method

    return limited


def _name_after(wrapper: Any, function: Any) -> None:
    """Gives a wrapper the name of a compiled function in its source, so that it is found there."""
    qualified = str(function.qualified_name).removeprefix("__torch__.")
    module, _, name = qualified.rpartition(".")
    wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module or "__main__", name, name
