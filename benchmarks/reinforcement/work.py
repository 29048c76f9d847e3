"""The program of PyTorch's tutorials on either RPC library, and observers of ``torchweft.rl``.

The side ``local`` has the environments and the arithmetic of the same program in one process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.frame.api import Api, current, is_joined, worker_name
from benchmarks.frame.work import Work
from benchmarks.reinforcement.native import NATIVE, OBSERVERS, STEPS, observers_of
from benchmarks.training.one_process import OneProcess

# The user's program: the same file on each side, which imports torch.distributed.rpc.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "reinforcement_learning"))
import tutorial

MANY = 16

IS_WEFT = is_joined() and current().rpc.__name__.startswith("torchweft.")

if IS_WEFT:
    from torchweft.rpc import functions

    class OwnAgent(tutorial.Agent):  # type: ignore[misc]
        """Batches calls by Weft's decorator, in place of the tutorial's pattern."""

        @functions.batched(largest=OBSERVERS, smallest=OBSERVERS, longest_wait=0.01)
        def choose(self, observers: list[int], states: Tensor) -> Tensor:
            """Decides for all observers that ask at this time."""
            actions: Tensor
            actions, all_logs = self.decide(states)
            for observer, logs in zip(observers, all_logs.unbind(), strict=True):
                self.logs[observer].append(logs)
            return actions


def ask_own(agent: Any, observer: int, states: Tensor) -> Any:
    return agent.rpc_sync().choose(observer, states)


def _names() -> list[str]:
    return [worker_name(rank) for rank in range(1, OBSERVERS + 1)]


def _episodes(kind: Callable[..., Any], ask: Callable[..., Any], count: int) -> Work:
    """Returns a work that runs episodes, each with the update of the policy after it."""

    @functools.cache
    def agent() -> Any:
        return kind(_names(), count)

    def run() -> None:
        torch.set_num_threads(1)
        agent().run_episode(ask, tutorial.STEPS)

    return Work(run, OBSERVERS * count * tutorial.STEPS)


@functools.cache
def _native(halves: int) -> Any:
    return observers_of(_names(), halves)


def _round(halves: int) -> int:
    torch.set_num_threads(1)
    return sum(each.steps for each in _native(halves).round())


def works(api: Api) -> dict[str, Work]:
    """Returns the works, each on the first worker, which has the agent."""
    own, ask = (OwnAgent, ask_own) if IS_WEFT else (tutorial.Agent, tutorial.ask_together)
    found = {
        "unbatched": _episodes(tutorial.Agent, tutorial.ask_alone, 1),
        "batched": _episodes(tutorial.Agent, tutorial.ask_together, 1),
        "16 environments": _episodes(tutorial.Agent, tutorial.ask_together, MANY),
        "batched by Weft": _episodes(own, ask, 1),
        "16 environments by Weft": _episodes(own, ask, MANY),
    }
    if IS_WEFT:
        # Steps that merely reset an environment do not count, as they do not on RLlib's side.
        for name, halves in (("native vectors", 1), ("two halves", 2)):
            run = functools.partial(_round, halves)
            found[name] = Work(run, OBSERVERS * NATIVE * STEPS, is_counted=True)
    return found


def local_works() -> dict[str, Work]:
    """Returns the works without a call: one observer has the environments of all three."""
    tutorial.rpc = OneProcess().rpc
    return {
        "unbatched": _local_episodes(OBSERVERS, 1),
        "batched": _local_episodes(1, OBSERVERS),
        "16 environments": _local_episodes(1, OBSERVERS * MANY),
    }


def _local_episodes(forwards: int, count: int) -> Work:
    """Returns a work whose policy runs so often for each step, each time for ``count`` states."""

    def ask(agent: Any, observer: int, states: Tensor) -> Tensor:
        own = agent.local_value()
        actions, logs = zip(*[own.decide(each) for each in torch.split(states, count)], strict=True)
        own.logs[observer].append(torch.cat(logs))
        return torch.cat(actions)

    @functools.cache
    def agent() -> Any:
        return tutorial.Agent([""], forwards * count)

    def run() -> None:
        torch.set_num_threads(1)
        agent().run_episode(ask, tutorial.STEPS)

    return Work(run, forwards * count * tutorial.STEPS)
