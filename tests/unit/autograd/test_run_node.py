"""Tests running one node while other threads use the same node of a retained graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from torchweft.autograd.local_engine import run_node

LIMIT_S = 20.0


class Meeting(torch.autograd.Function):
    """Doubles its argument; the backward pass waits until two threads have arrived."""

    barrier = threading.Barrier(2)

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Meeting.barrier.wait(LIMIT_S)
        return gradient * 2


@pytest.fixture
def leaf_and_result() -> tuple[Tensor, Tensor]:
    leaf = torch.ones(3, requires_grad=True)
    return leaf, Meeting.apply(leaf)


def both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    """Runs two functions concurrently, the first in this thread."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second)
        return first(), other.result(LIMIT_S)


@pytest.mark.parametrize("value", [3.0, None])
def test_each_of_two_threads_has_its_own_results(
    leaf_and_result: tuple[Tensor, Tensor], value: float | None
) -> None:
    node = leaf_and_result[1].grad_fn
    assert node is not None

    def run(gradient: float | None) -> Tensor | None:
        given = {} if gradient is None else {0: torch.full((3,), gradient)}
        return run_node(node, given)[0]

    first, second = both(lambda: run(1.0), lambda: run(value))
    assert first.tolist() == [2.0] * 3
    assert second.tolist() == [0.0 if value is None else 2 * value] * 3


def test_a_pass_of_torch_is_not_disturbed(leaf_and_result: tuple[Tensor, Tensor]) -> None:
    leaf, result = leaf_and_result
    node = result.grad_fn
    assert node is not None
    (found,), _ = both(
        lambda: run_node(node, {0: torch.ones(3)}),
        lambda: result.sum().backward(retain_graph=True),
    )
    assert found is not None
    assert found.tolist() == [2.0] * 3
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 3


def test_a_node_whose_hook_runs_another_node(leaf_and_result: tuple[Tensor, Tensor]) -> None:
    inner = (torch.ones(3, requires_grad=True) * 5).grad_fn
    outer = (torch.ones(3, requires_grad=True) * 7).grad_fn
    assert inner is not None
    assert outer is not None
    seen: list[Any] = []
    outer.register_prehook(lambda _: seen.append(run_node(inner, {0: torch.ones(3)})[0].tolist()))
    assert run_node(outer, {0: torch.ones(3)})[0].tolist() == [7.0] * 3
    assert seen == [[5.0] * 3]
