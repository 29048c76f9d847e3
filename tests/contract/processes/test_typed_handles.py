"""``rpc.on``: functions on a worker, methods of a value, and what the caller refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.processes.functions import collect, soon
from torchweft import rpc
from torchweft.errors import (
    ArgumentTypeError,
    CallTimeout,
    ConfigurationError,
    MethodNotFound,
    UnknownWorker,
)

pytestmark = [pytest.mark.keeps("threads", "descriptors"), pytest.mark.usefixtures("group")]


class Counter:
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.count, self.step = start, step

    def add(self, times: int = 1) -> int:
        self.count += times * self.step
        return self.count

    async def add_soon(self, times: int) -> int:
        return self.add(times)

    @rpc.async_execution
    def add_later(self, times: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(self.add(times))
        return future


class Down(Counter):
    def add(self, times: int = 1) -> int:
        return super().add(-times)


def plain(a: int) -> int:
    return a


def waiting() -> None:
    while not rpc.is_cancelled():
        pass


def test_functions_run_with_positional_and_keyword_arguments() -> None:
    worker = rpc.on("worker0")
    assert worker.rpc_sync(collect, 1, func=2) == ((1,), {"func": 2})
    assert worker.rpc_async(collect, x=torch.ones(2)).wait()[1]["x"].tolist() == [1, 1]
    assert worker.remote(collect, 5).to_here() == ((5,), {})
    assert rpc.on(1).rpc_sync(soon, "later") == "later"
    assert rpc.on(rpc.get_worker_info()).rpc_sync(collect) == ((), {})


def test_methods_of_a_value_run_on_its_owner() -> None:
    counter = rpc.on("worker0").remote(Counter, 10, step=2)
    assert rpc.on(counter).rpc_sync(Counter.add) == 12
    assert rpc.on(counter).rpc_async(Counter.add, times=2).wait() == 16
    assert rpc.on(counter).remote(Counter.add, 2).to_here() == 20
    assert rpc.on(counter).rpc_sync(Counter.add_soon, 1) == 22
    assert rpc.on(counter).rpc_async(Counter.add_later, 1).wait() == 24
    down = rpc.on("worker0").remote(Down, 0)
    assert rpc.on(down).rpc_sync(Counter.add, 3) == -3
    own = rpc.RRef(Counter(0))
    assert rpc.on(own).rpc_sync(Counter.add) == own.local_value().count == 1
    tensor = rpc.remote("worker0", torch.full, args=((2,), 3.0))
    assert rpc.on(tensor).rpc_sync(torch.Tensor.sum).item() == 6.0


def test_the_limit_holds_for_each_call() -> None:
    worker = rpc.on("worker0", timeout=0.1)
    for _ in range(2):
        with pytest.raises(CallTimeout):
            worker.rpc_sync(waiting)


def test_what_cannot_work_is_refused_by_the_caller() -> None:
    for wrong, error in (("worker9", UnknownWorker), (3.5, ArgumentTypeError)):
        with pytest.raises(error):
            rpc.on(wrong)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError):
        rpc.on("worker0", timeout=-3).rpc_sync(plain, 1)
    counter: rpc.RRef[Any] = rpc.remote("worker0", Counter, args=(0,))
    for no_method in (plain, lambda self: self, Counter, "add", counter.to_here().add, None):
        with pytest.raises(ArgumentTypeError, match="a method as its class has it"):
            rpc.on(counter).rpc_async(no_method)  # type: ignore[arg-type]
    with pytest.raises(MethodNotFound, match="'Counter' object has no attribute 'upper'"):
        rpc.on(counter).remote(str.upper)
    for proxy in (counter.rpc_sync(), counter.rpc_async(), counter.remote()):
        with pytest.raises(MethodNotFound, match="did you mean 'add_soon'"):
            proxy.add_son(1)
        assert dir(proxy) == ["add", "add_later", "add_soon"]
    # A reference that another worker made does not know its class, so the owner answers.
    received: rpc.RRef[Any] = rpc.rpc_sync("worker1", make_counter_on, args=("worker0",))
    with pytest.raises(AttributeError, match="add_son"):
        received.rpc_sync().add_son(1)
    assert received.rpc_sync().add(1) == 1


def make_counter_on(to: str) -> rpc.RRef[Any]:
    return rpc.remote(to, Counter, args=(0,))
