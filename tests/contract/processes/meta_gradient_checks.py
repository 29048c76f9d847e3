"""Meta-gradients by maps, compared with those of a single process.

*Equal to 1e-12* means: no entry of the gradient of any parameter differs by more than that fraction
of the largest entry of all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchweft
from tests import remains
from tests.contract.processes import meta_gradient_functions as functions
from tests.contract.processes.functions import wait_until
from torchweft import mapreduce, rpc
from torchweft.launch import Cluster

SEEDS = torch.arange(8)
EXACT = 1e-12


class Outcome(NamedTuple):
    """The mean query error over all tasks, and its gradient for each parameter."""

    error: Tensor
    gradients: list[Tensor]


@functools.cache
def single_process(is_second_order: bool) -> Outcome:
    model = functions.network()
    error = functions.mean_query_error(model, SEEDS, is_second_order)
    return Outcome(error.detach(), list(torch.autograd.grad(error, list(model.parameters()))))


def by_map(
    way: str,
    function: Callable[..., Tensor],
    *args: Any,
    partitioner: Any,
    before_backward: Callable[[Tensor], None] | None = None,
) -> Outcome:
    """Computes the outcome by a map.

    Args:
        way: ``backward`` into ``.grad``, or ``grad``.
        function: Is called with the model, seeds of tasks, and ``args``.
        args: Further arguments.
        partitioner: Says which worker gets which tasks.
        before_backward: Called with the error between both passes.
    """
    model = functions.network()
    with torchweft.autograd.context() as context_id:
        error = mapreduce.remote_sync_call(
            function,
            args=(model, SEEDS, *args),
            partitioner=partitioner,
            reducer=mapreduce.mean_reducer,
        )
        if before_backward is not None:
            before_backward(error)
        if way == "grad":
            gradients = mapreduce.autograd.grad(context_id, error, model.parameters())
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            mapreduce.autograd.backward(context_id, error)
            gradients = tuple(_grad_of(parameter) for parameter in model.parameters())
    return Outcome(error.detach(), list(gradients))


def _grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest difference of two entries, as a fraction of the largest entry of all."""
    assert [each.shape for each in found] == [each.shape for each in expected]
    return float((flat(found) - flat(expected)).abs().max() / flat(expected).abs().max())


def check(outcome: Outcome, is_second_order: bool, within: float = EXACT) -> None:
    expected = single_process(is_second_order)
    assert abs(float(outcome.error / expected.error) - 1) <= within
    assert difference(outcome.gradients, expected.gradients) <= within


@contextlib.contextmanager
def nothing_kept(group: Cluster, victims: Sequence[str] = ()) -> Iterator[None]:
    """Checks that each survivor of the block ends with the references and contexts of before."""
    names = [name for name in (group.name, *group.names) if name not in victims]

    def kept() -> dict[str, Any]:
        return {name: rpc.rpc_sync(name, _state) for name in names}

    before = kept()
    yield
    wait_until(lambda: kept() == before, lambda: f"before: {before}; now: {kept()}")


def _state() -> tuple[dict[str, int], dict[str, list[Any]]]:
    return remains.count_references(), remains.of_autograd()
