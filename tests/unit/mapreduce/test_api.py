from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.mapreduce import fake_group
from torchweft import mapreduce
from torchweft.engine.codec.functions import name_of, resolve
from torchweft.errors import ArgumentTypeError, ConfigurationError, UnknownWorker
from torchweft.mapreduce import api
from torchweft.mapreduce.partitioners import Cut
from torchweft.mapreduce.plan import Manner
from torchweft.mapreduce.reducers import reduce


class HereCall:
    """Replaces a ``Plan``; ``run_here`` calls the function for each part at once."""

    made: list[HereCall]
    departed: list[UnknownWorker]

    def __init__(self, function: Callable[..., Any], cut: Cut, manner: Manner) -> None:
        if HereCall.departed:
            raise HereCall.departed.pop()
        self.function = function
        self.cut = cut
        self.manner = manner
        HereCall.made.append(self)


def run_here(call: HereCall, reducer: Callable[..., Any] | None) -> torch.futures.Future[Any]:
    results: Any = [call.function(*args, **kwargs) for _, args, kwargs in call.cut.parts]
    if reducer is not None:
        results = reduce(reducer, results, [part.weight for part in call.cut.parts])
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(results)
    return future


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[HereCall]:
    fake_group.join(monkeypatch, size=2)
    monkeypatch.setattr(api, "Plan", HereCall)
    monkeypatch.setattr(api, "run_map", run_here)
    HereCall.made, HereCall.departed = [], []
    return HereCall.made


@mapreduce.parallelize()
def mean(value: Tensor) -> Tensor:
    """Says what it does."""
    return value.mean()


@mapreduce.parallelize_async(partitioner=mapreduce.batch_partitioner, balance=True, timeout=3)
def length(value: Tensor) -> int:
    return len(value)


class Owner:
    @mapreduce.parallelize(1, rerun=True, concurrency=2)
    def method(self, value: int) -> int:
        return value


def nobody(value: Any) -> Any:
    return value


def test_a_decorated_function_is_called_as_said(calls: list[HereCall]) -> None:
    length(torch.arange(5.0))
    assert Owner().method(3) == [3]
    assert [call.manner for call in calls] == [
        Manner(3, balance=True, rerun=None, concurrency=1),
        Manner(-1.0, balance=False, rerun=True, concurrency=2),
    ]


@pytest.mark.parametrize(
    ("decorated", "name"),
    [
        (mean, "mean__parallelize_unwrapped__"),
        (length, "length__parallelize_async_unwrapped__"),
        (Owner.method, "Owner__method__parallelize_unwrapped__"),
    ],
)
def test_the_original_goes_by_a_name_of_its_own(decorated: Any, name: str) -> None:
    original = decorated.__wrapped__
    assert original.__qualname__ == original.__name__ == name
    assert globals()[name] is original
    found = name_of(original, main_by_name=False)
    assert found == f"{__name__}:{name}".encode()
    assert resolve(found) is original
    assert pickle.loads(pickle.dumps(original)) is original


def test_a_function_whose_name_is_given_to_the_decorated_one_goes_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def original(value: int) -> int:
        return value

    original.__qualname__ = "rebound"
    monkeypatch.setitem(globals(), "rebound", original)
    monkeypatch.setitem(globals(), "rebound__parallelize_unwrapped__", None)
    decorated = mapreduce.parallelize(0)(original)
    assert original.__qualname__ == "rebound"
    monkeypatch.setitem(globals(), "rebound", decorated)
    assert decorated(1) == [1]
    assert original.__qualname__ == "rebound__parallelize_unwrapped__"
    assert name_of(original, main_by_name=False) == f"{__name__}:{original.__qualname__}".encode()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"func": 3}, "func is 3"),
        ({"args": torch.ones(2)}, "args is a Tensor"),
        ({"kwargs": [1]}, "kwargs is a list"),
        ({"reducer": 3}, "reducer is 3"),
        ({"concurrency": 1.5}, "concurrency is 1.5"),
        ({"balance": "no"}, "balance is 'no', a str; pass True or False"),
        ({"rerun": "no"}, "rerun is 'no', a str; pass True, False or None"),
        ({"partitioner": 1.5}, "partitioner"),
        ({"timeout": "3"}, "timeout is '3', a str"),
    ],
)
def test_arguments_of_wrong_types(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        mapreduce.remote_sync_call(**{"func": nobody, **how})


def test_a_worker_that_leaves_when_the_parts_are_made_gets_none(calls: list[HereCall]) -> None:
    HereCall.departed = [UnknownWorker("it has left"), UnknownWorker("and another one")]
    assert mapreduce.remote_sync_call(len, args=(torch.arange(5.0),)) == [2, 3]
    HereCall.departed = [UnknownWorker("it has left")]
    with pytest.raises(UnknownWorker):
        mapreduce.remote_sync_call(len, args=(torch.arange(5.0),), partitioner=1)
    assert len(calls) == 1


def test_no_part_at_a_time() -> None:
    with pytest.raises(ConfigurationError, match="concurrency is 0"):
        mapreduce.remote_sync_call(nobody, concurrency=0)


def test_a_decorator_without_parentheses() -> None:
    with pytest.raises(ArgumentTypeError, match=r"@parallelize\(\)"):
        mapreduce.parallelize(nobody)(torch.ones(3))  # type: ignore[arg-type]
