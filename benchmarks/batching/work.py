"""A server with a policy, and callers that ask it for actions, on either RPC library."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frame.api import Api, current, worker_name
from benchmarks.frame.work import Work

api = current()
rpc = api.rpc
async_execution: Callable[[Callable[..., Any]], Callable[..., Any]] = rpc.functions.async_execution

PROCESSES = 4
IN_FLIGHT = 16
CALLERS = PROCESSES * IN_FLIGHT
STATE, HIDDEN, ACTIONS = 4, 128, 2
ROUNDS = 50
"""Calls that each caller makes on one order of the server."""


@functools.cache
def policy() -> nn.Module:
    """Returns the policy of the server; the sizes are those of PyTorch's tutorial."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(STATE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, ACTIONS))


def decide(states: Tensor) -> Tensor:
    """Returns the best action for each state."""
    with torch.no_grad():
        scores: Tensor = policy()(states)
        return scores.argmax(dim=1)


def unbatched(state: Tensor) -> Tensor:
    return decide(state[None])[0]


class ByHand:
    """The pattern of PyTorch's tutorial on batched RPC, for batches of a fixed size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._future: Any = torch.futures.Future()
        self._states = torch.zeros(size, STATE)
        self._count = 0

    def act(self, state: Tensor) -> torch.futures.Future[Tensor]:
        """Returns a future of the action; the last call of a batch computes all actions."""
        future: torch.futures.Future[Tensor] | None = None
        with self._lock:
            place = self._count
            self._states[place].copy_(state)
            action: torch.futures.Future[Tensor] = self._future.then(
                lambda done: done.wait()[place]
            )
            self._count += 1
            if self._count == self._size:
                self._count = 0
                states, self._states = self._states, torch.zeros(self._size, STATE)
                future, self._future = self._future, torch.futures.Future()
        if future is not None:
            future.set_result(decide(states))
        return action


_many, _single = ByHand(CALLERS), ByHand(1)


@async_execution
def by_hand(state: Tensor) -> torch.futures.Future[Tensor]:
    return _many.act(state)


@async_execution
def single_by_hand(state: Tensor) -> torch.futures.Future[Tensor]:
    return _single.act(state)


if api.package == "torchweft":
    in_batches: Callable[[Callable[..., Any]], Callable[..., Any]]
    in_full_batches: Callable[[Callable[..., Any]], Callable[..., Any]]
    in_batches = rpc.functions.batched(largest=CALLERS)
    in_full_batches = rpc.functions.batched(largest=CALLERS, smallest=CALLERS, longest_wait=1.0)

    @in_batches
    def batched(states: Tensor) -> Tensor:
        return decide(states)

    @in_full_batches
    def in_full(states: Tensor) -> Tensor:
        return decide(states)


def call_in_step(function: Callable[..., Any], rounds: int) -> None:
    """Makes 16 calls at a time, and waits for all of them; runs on a caller."""
    state = torch.randn(STATE)
    for _ in range(rounds):
        calls = [rpc.rpc_async(worker_name(0), function, (state,)) for _ in range(IN_FLIGHT)]
        for call in calls:
            call.wait()


def call_in_streams(function: Callable[..., Any], rounds: int) -> None:
    """Keeps 16 calls in flight; runs on a caller."""
    state = torch.randn(STATE)
    calls = deque(rpc.rpc_async(worker_name(0), function, (state,)) for _ in range(IN_FLIGHT))
    for _ in range((rounds - 1) * IN_FLIGHT):
        calls.popleft().wait()
        calls.append(rpc.rpc_async(worker_name(0), function, (state,)))
    for call in calls:
        call.wait()


def call_alone(function: Callable[..., Any], count: int) -> None:
    """Makes one call after the other; runs on a caller."""
    state = torch.randn(STATE)
    for _ in range(count):
        rpc.rpc_sync(worker_name(0), function, (state,))


def works(api: Api) -> dict[str, Work]:
    """Returns the works: the server orders the callers to call it."""
    found = {
        "by hand": _order(call_in_step, by_hand),
        "unbatched": _order(call_in_step, unbatched),
        "lone by hand": _lone(single_by_hand),
    }
    if api.package == "torchweft":
        found["64 callers"] = _order(call_in_step, batched)
        found["server"] = found["64 callers"]._replace(clock=time.process_time_ns)
        found["full batches"] = _order(call_in_step, in_full)
        found["server, full"] = found["full batches"]._replace(clock=time.process_time_ns)
        found["64 streams"] = _order(call_in_streams, batched)
        found["lone caller"] = _lone(batched)
    else:
        found["64 callers"] = found["full batches"] = found["by hand"]
        found["server"] = found["by hand"]._replace(clock=time.process_time_ns)
        found["server, full"] = found["server"]
        found["lone caller"] = found["lone by hand"]
    return found


def _callers() -> list[str]:
    return [worker_name(rank) for rank in range(1, api.size, 2)]


def _order(drive: Callable[..., None], function: Callable[..., Any]) -> Work:
    def run() -> None:
        for each in [rpc.rpc_async(to, drive, (function, ROUNDS)) for to in _callers()]:
            each.wait()

    return Work(run, CALLERS * ROUNDS)


def _lone(function: Callable[..., Any]) -> Work:
    caller = _callers()[0]
    return Work(lambda: rpc.rpc_sync(caller, call_alone, (function, ROUNDS)), ROUNDS)
