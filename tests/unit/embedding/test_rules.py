"""Optimizers on rows, compared with those of PyTorch for sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft.embedding import SGD, Adagrad, RowWiseAdagrad, Rule, SparseAdam
from torchweft.errors import ConfigurationError

ROWS, DIM = 20, 5
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def gradients(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(ROWS, (7,), generator=generator).unique()
    return rows, torch.randn(len(rows), DIM, generator=generator, dtype=dtype)


def stepped(rule: Rule, weights: Tensor, steps: int = 10) -> Tensor:
    weights, state = weights.clone(), rule.state_for(weights)
    for step in range(1, steps + 1):
        rows, values = gradients(step, weights.dtype)
        own = weights[rows]
        own_state = {name: each[rows] for name, each in state.items()}
        rule.apply(own, own_state, values, rule.lr, torch.tensor(float(step), dtype=torch.float64))
        weights[rows] = own
        for name, each in own_state.items():
            state[name][rows] = each
    return weights


def start(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(99), dtype=dtype)


CASES: list[tuple[Rule, Make]] = [
    (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    (
        Adagrad(lr=0.1, lr_decay=0.02, initial_accumulator_value=0.3, eps=1e-3),
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, lr_decay=0.02, initial_accumulator_value=0.3, eps=1e-3
        ),
    ),
    (SparseAdam(lr=0.05), lambda p: torch.optim.SparseAdam(p, lr=0.05)),
    (
        SparseAdam(lr=0.05, betas=(0.7, 0.8), eps=1e-3),
        lambda p: torch.optim.SparseAdam(p, lr=0.05, betas=(0.7, 0.8), eps=1e-3),
    ),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # from Adagrad itself
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("rule", "make"), CASES, ids=lambda value: getattr(value, "eps", ""))
def test_rows_change_as_by_pytorch(
    rule: Rule, make: Make, dtype: torch.dtype, bound: float
) -> None:
    weights = start(dtype)
    parameter = nn.Parameter(weights.clone())
    optimizer = make([parameter])
    for step in range(1, 11):
        rows, values = gradients(step, dtype)
        parameter.grad = torch.sparse_coo_tensor(rows[None], values, parameter.shape)
        optimizer.step()
    assert (stepped(rule, weights) - parameter.detach()).abs().max() <= bound


def test_row_wise_adagrad_is_that_of_fbgemm() -> None:
    rule = RowWiseAdagrad(lr=0.1, eps=1e-8)
    weights = start(torch.float64)
    expected, sums = weights.clone(), [0.0] * ROWS
    for step in range(1, 11):
        rows, values = gradients(step, torch.float64)
        for row, gradient in zip(rows.tolist(), values, strict=True):
            sums[row] += float(gradient.square().sum()) / DIM
            multiplier = 0.1 / (sums[row] ** 0.5 + 1e-8)
            expected[row] -= multiplier * gradient
    assert (stepped(rule, weights) - expected).abs().max() <= 1e-14
    assert rule.state_for(weights)["sum"].numel() == ROWS


def test_momentum_is_that_of_pytorch_for_rows_that_are_always_touched_and_else_lazy() -> None:
    rule = SGD(lr=0.1, momentum=0.9)
    weights = start(torch.float64)
    expected, velocity = weights.clone(), torch.zeros_like(weights)
    for step in range(1, 11):
        rows, values = gradients(step, torch.float64)
        velocity[rows] = 0.9 * velocity[rows] + values
        expected[rows] -= 0.1 * velocity[rows]
    assert (stepped(rule, weights) - expected).abs().max() <= 1e-14
    parameter = nn.Parameter(weights.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    state, own = rule.state_for(weights), weights.clone()
    for _ in range(5):
        parameter.grad = parameter.detach().sin()
        values = own.sin()
        optimizer.step()
        rule.apply(own, state, values, 0.1, torch.tensor(1.0))
    assert (own - parameter.detach()).abs().max() <= 1e-14


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SGD, {"lr": -1}, "SGD has lr=-1; it is a number of at least 0"),
        (SGD, {"lr": "0.1"}, "SGD has lr='0.1'; it is a number of at least 0"),
        (SGD, {"lr": None}, "SGD has lr=None"),
        (SGD, {"lr": torch.tensor(0.1)}, "SGD has lr=tensor"),
        (SGD, {"momentum": 1.0}, "momentum=1.0"),
        (Adagrad, {"eps": -1}, "eps=-1"),
        (RowWiseAdagrad, {"lr_decay": -1}, "RowWiseAdagrad has lr_decay=-1"),
        (SparseAdam, {"betas": (0.9, 1.0)}, "betas"),
        (SparseAdam, {"betas": (0.9,)}, "it is a pair of numbers"),
        (SparseAdam, {"betas": 0.9}, "it is a pair of numbers"),
        (SparseAdam, {"eps": 0}, "eps=0"),
    ],
)
def test_options_that_cannot_work_are_refused(kind: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kind(**options)
