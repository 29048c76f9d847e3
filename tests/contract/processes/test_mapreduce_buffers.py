"""Buffers of modules that a map changes come back as those of rank 0 under DDP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchweft import mapreduce, rpc
from torchweft.launch import Nursery, cluster

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)) * 3 + 5
WORKERS = ("worker0", "worker1")


@pytest.fixture(scope="module", autouse=True)
def _workers(nursery: Nursery) -> Iterator[None]:
    with cluster(workers=2, nursery=nursery):
        yield


class Counting(nn.Module):
    """Keeps rows in buffers: one that grows, one that is replaced, and one that nothing changes."""

    rows: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 4))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x.detach()])
        self.last = x[-1].detach().clone()
        return x


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counting(), nn.Linear(4, 1))


def forward(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def forward_of_options(x: Tensor, *, models: dict[str, list[nn.Module]]) -> Tensor:
    return forward(models["of the map"][0], x)


async def forward_async(model: nn.Module, x: Tensor) -> Tensor:
    return forward(model, x)


@rpc.functions.async_execution
def forward_later(model: nn.Module, x: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(forward(model, x))
    return future


def run(function: Any, *args: Any, workers: Any = WORKERS, **kwargs: Any) -> list[Tensor]:
    cut = mapreduce.dim_partitioner(0, keepdim=True, workers=workers)
    if workers is None:
        cut = mapreduce.batch_partitioner
    found: list[Tensor] = mapreduce.remote_sync_call(
        function, args=args, kwargs=kwargs, partitioner=cut
    )
    return found


def by_function(model: nn.Module) -> list[Tensor]:
    return run(forward, model, X)


def by_all_workers(model: nn.Module) -> list[Tensor]:
    return run(forward, model, X, workers=None)


def by_module(model: nn.Module) -> list[Tensor]:
    return run(model, X)


def by_method(model: nn.Module) -> list[Tensor]:
    return run(model.forward, X)


def by_partial(model: nn.Module) -> list[Tensor]:
    return run(partial(forward, model), X)


def by_options(model: nn.Module) -> list[Tensor]:
    return run(forward_of_options, X, models={"of the map": [model]})


def by_coroutine(model: nn.Module) -> list[Tensor]:
    return run(forward_async, model, X)


WAYS = [by_function, by_module, by_method, by_partial, by_options, by_coroutine, by_all_workers]


@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_first_part(way: Callable[[nn.Module], list[Tensor]]) -> None:
    model = make_model()
    wanted = copy.deepcopy(model)
    statistics = model[1].running_mean
    for _ in range(3):
        results = way(model)
        length = len(results[0])
        assert 0 < length < len(X)
        wanted(X[:length])
    torch.testing.assert_close(dict(model.named_buffers()), dict(wanted.named_buffers()))
    assert model[1].num_batches_tracked == 3
    assert len(model[2].rows) == 3 * length
    assert model[1].running_mean is statistics


def test_a_model_that_is_evaluated_or_fails_keeps_its_own() -> None:
    model = make_model()[:2].eval()
    before = copy.deepcopy(dict(model.named_buffers()))
    run(forward, model, X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(forward, model.train(), X[:, :2])
    torch.testing.assert_close(dict(model.named_buffers()), before)


def test_training_with_them_evaluates_as_it_trained() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wanted = copy.deepcopy(model)
    of_wanted = torch.optim.SGD(wanted.parameters(), lr=0.05)
    for _ in range(5):
        with mapreduce.autograd.context() as context_id:
            loss = torch.cat(run(forward, model, X)).pow(2).mean()
            optimizer.zero_grad()
            mapreduce.autograd.backward(context_id, loss)
            optimizer.step()
        parts = [copy.deepcopy(wanted[1:3]) for _ in range(2)]
        rows = []
        for part, x in zip(parts, X.split(6), strict=True):
            rows.append(
                torch.func.functional_call(
                    part, dict(wanted[1:3].named_parameters()), (wanted[0](x),)
                )
            )
        of_wanted.zero_grad()
        wanted[3](torch.cat(rows)).pow(2).mean().backward()
        of_wanted.step()
        statistics = dict(parts[0].named_buffers())
        for name, buffer in statistics.items():
            place, _, leaf = name.rpartition(".")
            setattr(wanted[1:3].get_submodule(place), leaf, buffer)
    torch.testing.assert_close(model.state_dict(), wanted.state_dict())
    torch.testing.assert_close(model.eval()(X), wanted.eval()(X))


def test_where_they_cannot_come_back_a_warning_says_so() -> None:
    model = make_model()
    with pytest.warns(RuntimeWarning, match="buffers of modules .* are dropped"):
        run(forward_later, model, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(forward_later, model.eval(), X)
