"""Batched functions that the workers of these tests run, and their callers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.processes.functions import wait_until
from torchweft import autograd, rpc
from torchweft.rpc import functions
from torchweft.rpc.functions import BatchStatistics, batch_statistics

LIMIT_S = 20.0


def model() -> nn.Module:
    """Returns a model that is the same wherever it is made."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


class Log(logging.Handler):
    """Takes what Weft warns of on its worker, until the end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []
        logging.getLogger("torchweft").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())

    def end(self) -> list[str]:
        logging.getLogger("torchweft").removeHandler(self)
        return self._texts


class Server:
    """An object with batched methods, each for batches of exactly so many calls as it says."""

    def __init__(self) -> None:
        self.model = model()
        self.runs: list[int] = []
        self.began = threading.Event()
        self.may_go_on = threading.Event()

    @rpc.expose
    @functions.batched(largest=6, smallest=6, longest_wait=LIMIT_S)
    def six(self, states: Tensor, names: list[str]) -> tuple[Tensor, int]:
        self.runs.append(len(names))
        assert [int(name[-1]) for name in names] == states[:, 0].tolist()
        return states * 2, len(names)

    @functions.batched(largest=4, smallest=4, longest_wait=LIMIT_S)
    def forward(self, states: Tensor) -> Tensor:
        self.runs.append(len(states))
        result: Tensor = self.model(states)
        return result

    @functions.batched(largest=3, smallest=3, longest_wait=LIMIT_S)
    def three(self, values: Tensor) -> Tensor:
        return values + 1

    @functions.batched(largest=4, smallest=4, longest_wait=LIMIT_S, isolate=True)
    def positive(self, values: Tensor) -> Tensor:
        self.runs.append(len(values))
        if (values < 0).any():
            raise ValueError("a value is negative")
        return values.sqrt()

    @functions.batched(largest=2, smallest=2, longest_wait=LIMIT_S)
    def failing(self, values: Tensor) -> Tensor:
        raise LookupError(f"no {values.tolist()}")

    @functions.batched(largest=2, smallest=2, longest_wait=LIMIT_S)
    def short(self, values: Tensor) -> Tensor:
        return values[:1]

    @functions.batched(largest=4, limit=4)
    def gated(self, values: Tensor) -> Tensor:
        self.runs.append(len(values))
        self.began.set()
        assert self.may_go_on.wait(LIMIT_S)
        return values

    def await_run(self) -> None:
        assert self.began.wait(LIMIT_S)
        self.began.clear()

    def go_on(self) -> None:
        self.may_go_on.set()

    def calls_of_threads(self, count: int) -> list[float]:
        """Calls a method of its own from threads, and returns the results."""
        found: dict[int, float] = {}

        def call(number: int) -> None:
            found[number] = self.gated(torch.tensor(float(number))).item()

        threads = [threading.Thread(target=call, args=(each,)) for each in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        return [found[number] for number in range(count)]

    def through(self, number: int) -> float:
        """Calls a method of its own, in a call of another worker."""
        return self.gated(torch.tensor(float(number))).item()

    def seen_runs(self) -> list[int]:
        return self.runs


@functions.batched(largest=2, smallest=2, longest_wait=0.01)
def plain(values: Tensor) -> Tensor:
    return values * 10


@rpc.register
@functions.batched(largest=2, smallest=2, longest_wait=LIMIT_S)
def registered(values: Tensor) -> Tensor:
    return values * 10


def call_six(server: rpc.RRef[Server], first: int, count: int) -> list[tuple[list[float], int]]:
    calls = [
        server.rpc_async().six(torch.full((2,), float(number)), f"call {number}")
        for number in range(first, first + count)
    ]
    return [(row.tolist(), size) for row, size in map(torch.futures.Future.wait, calls)]


def call_and_wait(server: rpc.RRef[Server], value: Any) -> Any:
    return server.rpc_sync().three(torch.tensor(value)).tolist()


def wait_in_vain(server: rpc.RRef[Server]) -> None:
    server.rpc_sync(timeout=0).three(torch.tensor(1.0))


def own_pass(server: rpc.RRef[Server], seed: int, requires_grad: bool) -> dict[str, Any]:
    """Makes a batched call in a context of its own; returns the gradients of both sides."""
    leaf = torch.full((4,), 0.1 * seed, dtype=torch.float64, requires_grad=requires_grad)
    with autograd.context() as context_id:
        state = (leaf * 2).sin()
        result = server.rpc_sync(timeout=LIMIT_S).forward(state)
        autograd.backward(context_id, [result.square().sum()])
        own = autograd.get_gradients(context_id).get(leaf)
        return {"own": own, "weights": weights_of(server, context_id)}


def weights_of(server: rpc.RRef[Server], context_id: int) -> list[Tensor]:
    return rpc.rpc_sync(server.owner(), weight_gradients, (server, context_id))


def weight_gradients(server: rpc.RRef[Server], context_id: int) -> list[Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[each] for each in server.local_value().model.parameters() if each in found]


def local_gradients(server: rpc.RRef[Server]) -> list[Tensor | None]:
    parameters = list(server.local_value().model.parameters())
    found = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    return found


def statistics_of(server: rpc.RRef[Server], method: Callable[..., object]) -> BatchStatistics:
    return rpc.rpc_sync(server.owner(), batch_statistics, (method, server))


def await_waiting(server: rpc.RRef[Server], method: Callable[..., object], count: int) -> None:
    wait_until(
        lambda: statistics_of(server, method).waiting == count,
        lambda: f"not {count} wait: {statistics_of(server, method)}",
    )
