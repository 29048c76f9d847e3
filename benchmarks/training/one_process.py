"""A library with an RPC library's names that makes no calls: it shows the arithmetic alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame.api import Api


class Reference:
    """Refers to an object of this process."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def local_value(self) -> Any:
        return self._value

    def owner(self) -> str:
        return ""


class LocalOptimizer:
    """Steps the parameters in this process."""

    def __init__(
        self, kind: type[torch.optim.Optimizer], references: Iterable[Reference], **options: Any
    ) -> None:
        self._local = kind([reference.local_value() for reference in references], **options)

    def step(self, context_id: int) -> None:
        self._local.step()
        self._local.zero_grad()  # a new context starts without gradients


def _call(to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
    return function(*args)


def _call_async(
    to: str, function: Callable[..., Any], args: Sequence[Any] = ()
) -> torch.futures.Future[Any]:
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(function(*args))
    return done


def _make(to: str, function: Callable[..., Any], args: Sequence[Any] = ()) -> Reference:
    return Reference(function(*args))


def _backward(context_id: int, roots: Sequence[Tensor]) -> None:
    torch.autograd.backward(roots)


class OneProcess(Api):
    """The library, as far as the programs of the benchmarks need it."""

    def __init__(self) -> None:
        self.package = "local"
        self.rank, self.size = 0, 2
        self.rpc = SimpleNamespace(
            rpc_sync=_call, rpc_async=_call_async, remote=_make, RRef=Reference
        )

    @property
    def autograd(self) -> Any:
        return SimpleNamespace(context=lambda: contextlib.nullcontext(0), backward=_backward)

    @property
    def optim(self) -> Any:
        return SimpleNamespace(DistributedOptimizer=LocalOptimizer)
