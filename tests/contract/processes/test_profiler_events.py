"""Calls as events of PyTorch's profilers, natively and under ``torchweft.compat``."""

from __future__ import annotations

import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft
from torchweft import rpc
from torchweft.compat.rpc import api as compat
from torchweft.errors import SerializationError
from torchweft.launch import Nursery
from torchweft.nn import RemoteModule

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
FIRST = "worker0"
PROFILERS = [torch.autograd.profiler.profile, torch.profiler.profile]


@pytest.fixture(scope="module", autouse=True)
def workers(nursery: Nursery) -> Iterator[None]:
    with torchweft.cluster(workers=1, nursery=nursery):
        yield


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def work(value: Tensor) -> Tensor:
    return value + 1


def fail() -> None:
    raise ValueError("as asked")


def events_of(
    program: Callable[[], None], profiler: Any = torch.profiler.profile
) -> dict[str, int]:
    """Returns how often each call was recorded, by its name, while a program ran."""
    with profiler() as measured:
        program()
    return {event.key: event.count for event in measured.key_averages() if "#" in event.key}


@pytest.mark.parametrize("profiler", PROFILERS)
@pytest.mark.parametrize("calls", [rpc, compat])
def test_each_call_is_an_event_with_the_name_of_its_function(calls: Any, profiler: Any) -> None:
    def program() -> None:
        for _ in range(2):
            calls.rpc_sync(FIRST, work, args=(torch.ones(3),))
        futures = [calls.rpc_async(FIRST, work, args=(torch.ones(3),)) for _ in range(3)]
        for future in futures:
            future.wait()
        calls.rpc_sync(FIRST, torch.add, args=(torch.ones(3), 1))
        calls.remote(FIRST, work, args=(torch.ones(3),)).to_here()

    assert events_of(program, profiler) == {
        f"rpc_sync#work(driver -> {FIRST})": 2,
        f"rpc_async#work(driver -> {FIRST})": 3,
        f"rpc_sync#aten::add(driver -> {FIRST})": 1,
        f"rpc_remote#work(driver -> {FIRST})": 1,
        f"to_here#(driver)->({FIRST})": 1,
    }


def test_calls_on_values_are_events_with_the_name_of_the_method() -> None:
    counting = rpc.remote(FIRST, Counting)
    module = RemoteModule(FIRST, nn.Linear, args=(3, 1))

    def program() -> None:
        counting.rpc_sync().add(1)
        counting.rpc_async().add(1).wait()
        rpc.on(counting).remote(Counting.add, 1).to_here()
        module(torch.ones(3))
        rpc.rpc_all([FIRST, FIRST], operator.add, (1, 2))

    found = events_of(program)
    assert found.pop(f"to_here#(driver)->({FIRST})") == 1
    assert found == {
        f"rpc_sync#add(driver -> {FIRST})": 1,
        f"rpc_async#add(driver -> {FIRST})": 3,
        f"rpc_remote#add(driver -> {FIRST})": 1,
        f"rpc_sync#forward(driver -> {FIRST})": 1,
    }


def test_a_call_that_fails_is_an_event_too() -> None:
    def program() -> None:
        with pytest.raises(ValueError, match="as asked"):
            rpc.rpc_sync(FIRST, fail)
        with pytest.raises(ValueError, match="as asked"):
            rpc.rpc_async(FIRST, fail).wait()
        with pytest.raises(SerializationError):
            rpc.rpc_async(FIRST, print, (threading.Lock(),))

    assert Counter(events_of(program)) >= Counter(
        {
            f"rpc_sync#fail(driver -> {FIRST})": 1,
            f"rpc_async#fail(driver -> {FIRST})": 1,
        }
    )


def test_an_event_lasts_until_its_call_has_ended() -> None:
    with torch.profiler.profile() as measured:
        rpc.rpc_async(FIRST, sleep, (0.2,)).wait()
    (event,) = (each for each in measured.events() if each.name.startswith("rpc_async#sleep"))
    assert event.time_range.elapsed_us() >= 0.2e6


def sleep(duration_s: float) -> None:
    time.sleep(duration_s)


def test_without_a_profiler_there_is_no_event() -> None:
    def program() -> None:
        pass

    rpc.rpc_sync(FIRST, work, (torch.ones(3),))
    assert events_of(program) == {}
