"""Provides the names of ``torch.distributed.optim.optimizer``, implemented by Weft.

There are no TorchScript optimizers here: a local optimizer steps in Python, whatever its class.
"""

# ruff: noqa: F401

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from torchweft.autograd import get_gradients
from torchweft.compat import autograd as dist_autograd
from torchweft.compat import rpc
from torchweft.compat.rpc.references import RRef
from torchweft.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]


class _LocalOptimizer:
    """An optimizer over parameters of this worker that steps with the gradients of a context.

    Args:
        optim_cls: Its class.
        local_params_rref: References to the parameters.
        args: Further arguments of the class, after the parameters.
        kwargs: Its keyword arguments.

    Attributes:
        global_lock: Held while ``.grad`` of parameters is replaced.
        optim: The optimizer itself.
    """

    global_lock: ClassVar = threading.Lock()

    def __init__(
        self,
        optim_cls: type[Optimizer],
        local_params_rref: Iterable[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._parameters = [reference.local_value() for reference in local_params_rref]
        self.optim = optim_cls(self._parameters, *args, **kwargs)

    def step(self, autograd_ctx_id: int) -> None:
        """Steps the parameters that have gradients in a context; their ``.grad`` stays as it is."""
        gradients = get_gradients(autograd_ctx_id)
        with self.global_lock:
            before = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self.optim.step()
            finally:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient


def _new_local_optimizer(
    optim_cls: type[Optimizer],
    local_params_rref: Iterable[RRef[Any]],
    *args: Any,
    **kwargs: Any,
) -> RRef[_LocalOptimizer]:
    return RRef(_LocalOptimizer(optim_cls, local_params_rref, *args, **kwargs))


def _local_optimizer_step(local_optim_rref: RRef[_LocalOptimizer], autograd_ctx_id: int) -> None:
    local_optim_rref.local_value().step(autograd_ctx_id)


def _wait_for_all(rpc_futs: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Waits for every future, even after a failure; then raises the last failure."""
    results: list[Any] = []
    failure: Exception | None = None
    for future in rpc_futs:
        try:
            results.append(future.wait())
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return results
