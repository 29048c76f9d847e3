"""Observers that ask an agent for actions, on either RPC library."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.frame.api import Api, current, worker_name
from benchmarks.frame.work import Work
from benchmarks.reinforcement.native import (
    NATIVE,
    OBSERVERS,
    STATE,
    STEPS,
    observers_of,
    policy,
)

api = current()
rpc = api.rpc
async_execution: Callable[[Callable[..., Any]], Callable[..., Any]] = rpc.functions.async_execution

MANY = 16


def decide(states: Tensor) -> Tensor:
    """Samples an action for each state, ``(..., 4)``."""
    with torch.no_grad():
        chances = policy()(states.reshape(-1, STATE)).softmax(dim=1)
        return torch.multinomial(chances, 1).reshape(states.shape[:-1])


class ByHand:
    """The pattern of PyTorch's tutorial on batched RPC: the last observer runs the policy."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._future: Any = torch.futures.Future()
        self._states = torch.zeros(OBSERVERS, count, STATE)
        self._waiting = 0

    def act(self, states: Tensor) -> torch.futures.Future[Tensor]:
        """Returns a future of the actions of one observer, for states ``(count, 4)``."""
        with self._lock:
            place, self._waiting = self._waiting, self._waiting + 1
            self._states[place].copy_(states)
            future = self._future
            actions: torch.futures.Future[Tensor] = future.then(lambda done: done.wait()[place])
            is_full = self._waiting == OBSERVERS
            if is_full:
                self._waiting = 0
                joined, self._states = self._states, torch.zeros_like(self._states)
                self._future = torch.futures.Future()
        if is_full:
            future.set_result(decide(joined))
        return actions


_by_hand = {count: ByHand(count) for count in (1, MANY)}


@async_execution
def by_hand(states: Tensor) -> torch.futures.Future[Tensor]:
    return _by_hand[len(states)].act(states)


if api.package == "torchweft":
    in_batches: Callable[[Callable[..., Any]], Callable[..., Any]]
    in_batches = rpc.functions.batched(largest=OBSERVERS, smallest=OBSERVERS, longest_wait=0.01)

    @in_batches
    def batched(states: Tensor) -> Tensor:
        return decide(states)


@functools.cache
def environments(count: int) -> list[Any]:
    """Returns the environments of this observer."""
    import gymnasium

    made = [gymnasium.make("CartPole-v1") for _ in range(count)]
    for seed, each in enumerate(made):
        each.reset(seed=seed)
    return made


def observe(function: Callable[..., Any], count: int) -> None:
    """Takes steps in all environments of this observer."""
    torch.set_num_threads(1)
    own = environments(count)
    states = [each.reset()[0] for each in own]
    for _ in range(STEPS):
        asked = torch.from_numpy(np.stack(states))
        actions = rpc.rpc_sync(worker_name(0), function, (asked,)).tolist()
        for place, (each, action) in enumerate(zip(own, actions, strict=True)):
            states[place], _, terminated, truncated, _ = each.step(action)
            if terminated or truncated:
                states[place] = each.reset()[0]


def _names() -> list[str]:
    return [worker_name(rank) for rank in range(1, OBSERVERS + 1)]


def _order(function: Callable[..., Any], count: int) -> Work:
    def run() -> None:
        torch.set_num_threads(1)
        for each in [rpc.rpc_async(to, observe, (function, count)) for to in _names()]:
            each.wait()

    return Work(run, OBSERVERS * count * STEPS)


@functools.cache
def _native(halves: int) -> Any:
    return observers_of(_names(), halves)


def _rounds(halves: int) -> None:
    torch.set_num_threads(1)
    _native(halves).round()


def works(api: Api) -> dict[str, Work]:
    """Returns the works: the agent orders the observers to take steps."""
    found = {"unbatched": _order(decide, 1)}
    if api.package == "torchweft":
        found["batched"], found["16 environments"] = _order(batched, 1), _order(batched, MANY)
        for name, halves in (("native vectors", 1), ("two halves", 2)):
            run = functools.partial(_rounds, halves)
            found[name] = Work(run, OBSERVERS * NATIVE * STEPS)
    else:
        found["batched"], found["16 environments"] = _order(by_hand, 1), _order(by_hand, MANY)
    return found
