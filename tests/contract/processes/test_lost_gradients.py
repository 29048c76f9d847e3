"""User programs whose gradients would otherwise be lost silently."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import torchweft
from torchweft import rpc
from torchweft.errors import AutogradError
from torchweft.launch import Nursery, cluster
from torchweft.optim import DistributedOptimizer

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

FIRST = "worker0"
weight = torch.nn.Parameter(torch.ones(3))


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=1, nursery=nursery):
        yield


def forward(batch: Tensor) -> Tensor:
    return batch * weight


def forward_wide(batch: Tensor) -> dict[str, Tensor]:
    return {"out": batch * weight, "weight": weight}


def fetch_weight() -> Tensor:
    return weight


def train_here(activations: Tensor) -> Tensor:
    loss = (activations * weight).sum()
    loss.backward()
    return loss.detach()


def requires_grad_of(value: Tensor) -> tuple[bool, bool]:
    return value.requires_grad, value.is_leaf


BATCH = torch.arange(3.0)


# Outside of a context


def test_backward_of_a_result() -> None:
    result = rpc.rpc_sync(FIRST, forward, (BATCH,))
    with pytest.raises(AutogradError, match=r"call torchweft\.autograd\.backward") as caught:
        result.sum().backward()
    assert caught.value.worker == FIRST


def test_backward_of_a_result_in_a_container() -> None:
    result = rpc.rpc_sync(FIRST, forward_wide, (BATCH,))["out"]
    with pytest.raises(AutogradError, match="worker0"):
        result.sum().backward()


def test_backward_of_a_referenced_value() -> None:
    result = rpc.remote(FIRST, forward, (BATCH,)).to_here()
    with pytest.raises(AutogradError, match="worker0"):
        result.sum().backward()


def test_backward_from_an_argument() -> None:
    mine = torch.ones(3, requires_grad=True)
    with pytest.raises(AutogradError, match="'driver', which had computed"):
        rpc.rpc_sync(FIRST, train_here, (mine * 2,))


def test_a_result_can_be_used_like_any_tensor() -> None:
    result = rpc.rpc_sync(FIRST, forward, (BATCH,))
    assert result.requires_grad
    assert result.sum().item() == 3
    assert result.detach().numpy().tolist() == [0, 1, 2]
    with torch.no_grad():
        result += 1
    result.mul_(2)
    assert torch.equal(result, torch.tensor([2.0, 4.0, 6.0]))
    mine = torch.ones(3, requires_grad=True)
    (mine * result.detach()).sum().backward()
    assert mine.grad is not None
    assert torch.equal(mine.grad, result)
    (gradient,) = torch.autograd.grad((result * 3).sum(), result)
    assert torch.equal(gradient, torch.full((3,), 3.0))


def test_a_leaf_is_a_leaf_of_its_own() -> None:
    fetched = rpc.rpc_sync(FIRST, fetch_weight)
    assert isinstance(fetched, torch.nn.Parameter)
    among_others = rpc.rpc_sync(FIRST, forward_wide, (BATCH,))["weight"]
    assert isinstance(among_others, torch.nn.Parameter)
    for copy in (fetched, among_others):
        optimizer = torch.optim.SGD([copy], lr=0.5)
        (copy * BATCH).sum().backward()
        optimizer.step()
        assert torch.equal(copy.detach(), 1 - 0.5 * BATCH)
    mine = torch.ones(3, requires_grad=True)
    assert rpc.rpc_sync(FIRST, requires_grad_of, (mine,)) == (True, True)
    assert rpc.rpc_sync(FIRST, train_here, (mine,)).item() == 3


def test_forward_that_outlives_its_context() -> None:
    with torchweft.autograd.context() as context_id:
        future = rpc.rpc_async(FIRST, forward, (BATCH,))
        result = future.wait()
        torchweft.autograd.backward(context_id, [result.sum()])
    with pytest.raises(RuntimeError, match="backward reached a tensor"):
        result.sum().backward()


# Under no_grad


def test_forward_under_no_grad() -> None:
    with torchweft.autograd.context() as context_id:
        with torch.no_grad():
            results = [rpc.rpc_sync(FIRST, forward, (BATCH,))]
            results.append(rpc.rpc_sync(FIRST, forward_wide, (BATCH,))["out"])
            assert rpc.rpc_sync(FIRST, fetch_weight).requires_grad
        for result in results:
            with pytest.raises(AutogradError, match="root 0 does not require grad"):
                torchweft.autograd.backward(context_id, [result.sum()])


def test_future_of_a_call_under_no_grad() -> None:
    with torch.no_grad():
        future = rpc.rpc_async(FIRST, forward, (BATCH,))
    assert not future.wait().requires_grad


def test_arguments_under_no_grad() -> None:
    mine = torch.ones(3, requires_grad=True)
    computed = mine * 2
    with torch.no_grad():
        assert rpc.rpc_sync(FIRST, requires_grad_of, (computed,)) == (False, True)
        assert rpc.rpc_sync(FIRST, requires_grad_of, (mine,)) == (True, True)
        assert rpc.rpc_sync(FIRST, train_here, (computed,)).item() == 6


# Steps


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch: Tensor) -> Tensor:
        return batch * self.weight


def test_step_without_gradients() -> None:
    layer = torchweft.nn.RemoteModule(FIRST, Layer)
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)
    with torchweft.autograd.context() as context_id:
        layer(BATCH)
        with pytest.warns(RuntimeWarning, match=r"no gradient for any parameter .* 'worker0'"):
            optimizer.step(context_id)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # It warns only once.
            optimizer.step(context_id)


def test_step_with_a_gradient_for_some_parameters() -> None:
    layers = [torchweft.nn.RemoteModule(where, Layer) for where in (FIRST, "driver")]
    parameters = [each for layer in layers for each in layer.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    with torchweft.autograd.context() as context_id:
        torchweft.autograd.backward(context_id, [layers[0](BATCH).sum()])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step(context_id)
