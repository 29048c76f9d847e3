"""A loss of a model and rows of inputs, mapped over workers, and its gradients in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchweft
from tests.contract.processes import mapreduce_functions_m as parts
from torchweft import mapreduce


def on(*names: str) -> Any:
    """Returns a partitioner that gives single rows to these workers in turn."""
    return mapreduce.dim_partitioner(0, exclusive=True, keepdim=True, workers=names)


def model_and_inputs(rows: int = 7) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, torch.randn(rows, 3, dtype=torch.float64)


def single_gradients(model: nn.Module, losses: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(torch.stack(list(losses)).mean(), list(model.parameters())))


def check_gradients(model: nn.Module, inputs: Tensor, found: dict[Tensor, Tensor]) -> None:
    rows = [parts.loss(model, row) for row in inputs.split(1)]
    for parameter, expected in zip(model.parameters(), single_gradients(model, rows), strict=True):
        torch.testing.assert_close(found[parameter], expected, rtol=1e-12, atol=1e-14)


def map_and_check(function: Callable[..., Any], *args: Any, **how: Any) -> None:
    """Maps a loss of a model and rows of inputs, and compares gradients with a single process."""
    model, inputs = model_and_inputs()
    with torchweft.autograd.context() as context_id:
        loss = mapreduce.remote_sync_call(
            function, args=(model, inputs, *args), reducer=mapreduce.mean_reducer, **how
        )
        torchweft.autograd.backward(context_id, [loss])
        found = torchweft.autograd.get_gradients(context_id)
    check_gradients(model, inputs, found)
