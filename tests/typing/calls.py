"""What a type checker knows of calls; mypy reads this file with the sources, and nobody runs it.

A line with ``type: ignore`` has an error that mypy must find: an ignore without one is an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from torchweft import rpc
from torchweft.rpc import Future, RRef, functions

T = TypeVar("T")


def scaled(x: Tensor, by: float = 2.0, *, bias: bool = False) -> Tensor:
    return x * by + bias


def total(*numbers: int) -> int:
    return sum(numbers)


def nothing() -> None:
    return None


async def soon(name: str) -> list[str]:
    return [name]


@rpc.async_execution
def later(count: int) -> torch.futures.Future[bytes]:
    raise NotImplementedError(count)


def first_of(values: list[T]) -> T:
    return values[0]


class Model(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1, bias)

    def loss(self, x: Tensor, weight: float = 1.0) -> Tensor:
        return self.layer(x).sum() * weight  # type: ignore[no-any-return]  # torch's own types

    async def evaluate(self, split: str) -> float:
        return float(len(split))

    @rpc.async_execution
    def update(self, gradients: list[Tensor]) -> torch.futures.Future[int]:
        raise NotImplementedError(gradients)


X = torch.ones(2)


def results_of_functions_are_known() -> None:
    assert_type(rpc.rpc_sync("w", scaled, args=(X,)), Tensor)
    assert_type(rpc.rpc_sync(1, scaled, (X, 3.0)), Tensor)
    assert_type(rpc.rpc_sync("w", total, args=(1, 2, 3)), int)
    assert_type(rpc.rpc_async("w", scaled, args=(X,), timeout=5), Future[Tensor])
    assert_type(rpc.remote("w", scaled, args=(X,)), RRef[Tensor])
    assert_type(rpc.rpc_sync("w", torch.add, args=(X, 1)), Tensor)
    rpc.rpc_sync("w", nothing)

    rpc.rpc_sync("w", scaled, args=X)  # type: ignore  # no tuple
    rpc.rpc_sync("w", 3, args=(X,))  # type: ignore  # no function
    number: int = rpc.rpc_sync("w", scaled, args=(X,))  # type: ignore
    total(number)


def the_result_of_a_coroutine_or_future_is_what_it_gives() -> None:
    assert_type(rpc.rpc_sync("w", soon, args=("a",)), list[str])
    assert_type(rpc.rpc_async("w", soon, args=("a",)), Future[list[str]])
    assert_type(rpc.remote("w", soon, args=("a",)), RRef[list[str]])
    assert_type(rpc.rpc_sync("w", later, args=(3,)), bytes)
    assert_type(rpc.rpc_sync("w", soon, kwargs={"name": "a"}), list[str])


async def futures_can_be_awaited() -> None:
    assert_type(await rpc.rpc_async("w", scaled, args=(X,)), Tensor)
    for future in rpc.as_completed([rpc.rpc_async("w", scaled, args=(X,))]):
        assert_type(future.wait(), Tensor)


def keyword_arguments_and_programs_of_unknown_types_are_accepted(
    function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    assert_type(rpc.rpc_sync("w", scaled, args=(X,), kwargs={"bias": True}), Tensor)
    assert_type(rpc.rpc_sync("w", scaled, (X,), {"bias": True}), Tensor)
    assert_type(rpc.rpc_sync("w", scaled, kwargs={"x": X}), Tensor)
    rpc.rpc_sync("w", function, args=args)
    rpc.remote("w", lambda: 3)
    rpc.rpc_sync("w", lambda x: x + 1, args=(1,))
    return rpc.rpc_sync("w", function, args, kwargs)


def several_workers() -> None:
    assert_type(rpc.rpc_all(["a", "b"], scaled, args=(X,)), list[Tensor])
    assert_type(rpc.rpc_all(["a"], soon, args=("a",)), list[list[str]])
    found = rpc.rpc_all(["a"], scaled, args=(X,), return_exceptions=True)
    assert_type(found, list[Tensor | Exception])


def everything_is_checked_behind_on() -> None:
    worker = rpc.on("w", timeout=5)
    assert_type(worker.rpc_sync(scaled, X, by=3, bias=True), Tensor)
    assert_type(worker.rpc_sync(first_of, ["a"]), str)
    assert_type(worker.rpc_async(soon, name="a"), Future[list[str]])
    assert_type(worker.rpc_sync(later, 3), bytes)
    assert_type(worker.remote(Model, 3, bias=False), RRef[Model])
    worker.rpc_sync(scaled, X, bais=True)  # type: ignore  # misspelt
    worker.rpc_sync(scaled)  # type: ignore  # too few
    worker.rpc_async(soon, 3)  # type: ignore
    worker.rpc_sync(later, "3")  # type: ignore
    worker.rpc_sync(total, 1, "2")  # type: ignore
    worker.remote(scaled, X, 1.0, True)  # type: ignore  # bias goes by name
    worker.remote(Model, "3")  # type: ignore


def methods_are_known(model: RRef[Model]) -> None:
    assert_type(model.rpc_sync(), Model)
    assert_type(model.rpc_sync(timeout=5).loss(X, weight=2), Tensor)
    assert_type(model.to_here().layer, nn.Linear)
    model.rpc_sync().loss("x")  # type: ignore
    model.rpc_sync().loss(X, wieght=2)  # type: ignore
    assert_type(model.rpc_async().loss(X), Future[Any])
    assert_type(model.remote().loss(X), RRef[Any])


def methods_are_known_behind_on(model: RRef[Model]) -> None:
    assert_type(rpc.on(model).rpc_sync(Model.loss, X, weight=2), Tensor)
    assert_type(rpc.on(model).rpc_async(Model.loss, X), Future[Tensor])
    assert_type(rpc.on(model).remote(Model.loss, X), RRef[Tensor])
    assert_type(rpc.on(model).rpc_sync(Model.evaluate, "test"), float)
    assert_type(rpc.on(model).rpc_async(Model.update, [X]), Future[int])
    rpc.on(model).rpc_sync(Model.loss)  # type: ignore  # too few
    rpc.on(model).rpc_async(Model.loss, X, 1.0, 2.0)  # type: ignore  # too many
    rpc.on(model).rpc_sync(Model.lose, X)  # type: ignore  # misspelt
    rpc.on(model).rpc_sync(str.upper)  # type: ignore  # a method of another class


@functions.batched
def classified(images: Tensor) -> Tensor:
    return images


class Sampler:
    def __init__(self, seed: int, *, size: int = 1) -> None: ...

    @functions.batched(largest=8)
    def act(self, states: Tensor) -> Tensor:
        return states

    async def score(self, split: str) -> float:
        return float(len(split))

    def samples(self, count: int) -> Iterator[Tensor]:
        raise NotImplementedError(count)


def batched_calls_actors_and_streams(x: Tensor) -> None:
    assert_type(rpc.rpc_sync("a", classified, (x,)), Tensor)
    rpc.on("a").rpc_sync(classified, "x")  # type: ignore
    samplers = rpc.actors(["a", "b"], Sampler, 7, size=2)
    assert_type(samplers, rpc.Actors[Sampler])
    rpc.actors(["a"], Sampler, "7")  # type: ignore[arg-type]
    assert_type(samplers[0], RRef[Sampler])
    assert_type(samplers.rpc_sync(Sampler.act, x), list[Tensor])
    assert_type(samplers.rpc_async(Sampler.act, x), list[Future[Tensor]])
    assert_type(samplers.rpc_sync(Sampler.score, "test"), list[float])
    assert_type(samplers.rpc_async(Sampler.score, "test"), list[Future[float]])
    samplers.rpc_sync(Sampler.act, 5)  # type: ignore
    for value in rpc.stream(samplers[0], Sampler.samples, (3,)):
        assert_type(value, Tensor)
    streams = [rpc.stream(each, Sampler.samples, (3,)) for each in samplers]
    for stream, value in rpc.merged(streams):
        assert_type(stream, rpc.Stream[Tensor])
        assert_type(value, Tensor)


async def in_coroutines(model: RRef[Model], x: Tensor) -> None:
    assert_type(await model, Model)
    calls = [rpc.rpc_async("w", scaled, args=(x,))]
    async for future in rpc.as_completed(calls):
        assert_type(await future, Tensor)
    done, running = rpc.wait(calls, num_returns=1, timeout=1.0)
    assert_type(done, list[Future[Tensor]])
    assert_type(running[0].wait(timeout=1.0), Tensor)
    assert_type(running[0].result(), Tensor)
    async for number in rpc.stream("w", numbers, (3,)):
        assert_type(number, int)


async def numbers(count: int) -> AsyncIterator[int]:
    yield count
