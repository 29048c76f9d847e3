"""The graphs of a batch's calls, in one process: callers are threads and lines of a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchweft.autograd.contexts import make_placeholders
from torchweft.errors import AutogradError
from torchweft.rpc.batching import LocalCall
from torchweft.rpc.stacking import Entry, Options, Runner, take_apart


class Caller:
    name = "caller"


def run(function: Callable[..., object], *inputs: tuple[object, ...], pad: float | None = None
        ) -> list[Tensor]:  # fmt: skip
    """Runs a function for several calls in one batch; returns their results."""
    runner = Runner(function, "function", Options(pad=pad))
    entries = [Entry(LocalCall(Caller(), 0), (), take_apart(each), 0.0) for each in inputs]
    results = []
    for result, error in runner.outcomes(entries):
        if error is not None:
            raise error
        results.append(result)
    return results


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def inputs(count: int, requires_grad: bool = True) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, dtype=torch.float64, requires_grad=requires_grad) for _ in range(count)]


def close(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.allclose(one, other, rtol=0, atol=1e-12)


def test_padded_calls_have_gradients_of_their_own_size() -> None:
    short, long = (torch.ones(n, dtype=torch.float64, requires_grad=True) for n in (2, 3))
    results = run(lambda x: x.square().sum(dim=1), (short,), (long,), pad=5.0)
    results[0].backward()
    assert short.grad is not None
    assert short.grad.tolist() == [2.0, 2.0]
    assert long.grad is None


def test_second_derivatives_of_calls_without_gradients_of_their_own(layer: nn.Linear) -> None:
    calls = inputs(2, requires_grad=False)
    results = run(lambda x: layer(x).tanh(), *[(each,) for each in calls])

    def second(y: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(y.sum(), layer.weight, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), layer.weight)
        return found

    assert close(second(results[1]), second(layer(calls[1]).tanh()))


def test_second_derivatives_through_arguments_are_refused(layer: nn.Linear) -> None:
    call = inputs(1)[0]
    (result,) = run(lambda x: layer(x), (call,))
    with pytest.raises(AutogradError, match="second derivatives"):
        torch.autograd.grad(result.sum(), call, create_graph=True)


def test_a_result_behind_which_is_a_tensor_of_another_worker_is_refused() -> None:
    _, (received,) = make_placeholders([torch.ones(3)])
    with pytest.raises(AutogradError, match="depends on a tensor that another worker"):
        run(lambda x: x * received, (torch.ones(3),))


def test_a_leaf_with_a_hook_is_refused(layer: nn.Linear) -> None:
    layer.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(AutogradError, match=r"leaf of shape \[2, 3\].*has a hook"):
        run(lambda x: layer(x), (torch.ones(3, dtype=torch.float64),))
