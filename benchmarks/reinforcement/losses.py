"""Environment steps while an observer, or the agent, is killed and restarted; see the README."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.frame.report import provenance
from benchmarks.frame.run import end_on_sigterm, save
from benchmarks.frame.summary import aligned
from benchmarks.reinforcement.policies import Sampling
from torchweft import checkpoint, cluster, knobs, rpc
from torchweft.errors import WorkerLost
from torchweft.rl import Agent, Environments, Observers

ENVIRONMENTS = 8
STEPS = 8
STEP_S = 0.002
"""How long a step of an observer takes, beside the arithmetic: so cores are not the limit."""
TIME_LIMIT_S = 1.0
AWAY_S = 4.0
"""About how long a killed worker stays away."""
PHASE_S = 2.0
_kept: dict[str, Any] = {}


class Walks:
    """A vector of random walks, whose steps take some time."""

    metadata: ClassVar = {"autoreset_mode": "NextStep"}

    def __init__(self, count: int) -> None:
        self.num_envs = count
        self.single_observation_space = _Space((4,))
        self.single_action_space = _Space(())
        self._numbers = np.zeros((count, 4), np.float32)
        self._falses = np.zeros(count, np.bool_)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self._numbers[:] = 0
        return self._numbers.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        time.sleep(STEP_S)
        self._numbers[:, 0] += 0.1 * actions
        rewards = self._numbers[:, 0]
        return self._numbers.copy(), rewards, self._falses.copy(), self._falses.copy(), {}

    def close(self) -> None:
        pass


class _Space(NamedTuple):
    shape: tuple[int, ...]


class Phase(NamedTuple):
    """Some rounds in a row.

    Attributes:
        steps: Environment steps.
        seconds: Wall-clock time.
        longest_s: Of the longest round.
    """

    steps: int
    seconds: float
    longest_s: float

    @property
    def rate(self) -> float:
        """Environment steps a second."""
        return self.steps / self.seconds


def open_observers(names: list[str]) -> int:
    """Makes an agent in this process, with observers on workers; returns how many there are."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    agent = Agent(Sampling(nn.Linear(4, 2), (4,)))
    vector = Environments(Walks, ENVIRONMENTS, vectorized=True)
    observers = Observers(names, vector, agent, steps=STEPS, time_limit_s=TIME_LIMIT_S)
    _kept.update(agent=agent, observers=observers)
    return len(observers) - len(observers.left_out)


def rounds(seconds: float) -> Phase:
    """Collects rounds for some time; each is a version, so that a snapshot can be told."""
    steps, longest_s, began_s = 0, 0.0, time.perf_counter()
    now_s = began_s
    while now_s < began_s + seconds:
        steps += sum(each.steps for each in _kept["observers"].round())
        with _kept["agent"].policy.updating():
            pass
        ended_s = time.perf_counter()
        longest_s, now_s = max(longest_s, ended_s - now_s), ended_s
    return Phase(steps, now_s - began_s, longest_s)


def save_agent(folder: str) -> int:
    """Saves a snapshot; returns the version of the policy."""
    agent: Agent = _kept["agent"]
    checkpoint.save(folder, {"agent": agent}, step=agent.version)
    return agent.version


def resume(names: list[str], folder: str) -> int:
    """Makes agent and observers anew, from the newest snapshot; returns the version."""
    open_observers(names)
    checkpoint.restore(folder, {"agent": _kept["agent"]}, random_states=False)
    version: int = _kept["agent"].version
    return version


def close_observers() -> None:
    """Closes the observers of this process."""
    _kept.pop("observers").close()


def main() -> int:
    """Kills an observer and then an agent; returns 1 if a target is missed."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reinforcement.losses", description=__doc__
    )
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    options = parser.parse_args()
    table = ["| | steps a second | longest round |", "|---|---:|---:|"]
    verdicts: list[tuple[str, bool]] = []
    with knobs.RESTART_BACKOFF_S.override(AWAY_S):
        _kill_observer(table, verdicts)
        _kill_agent(table, verdicts)
    lines = [f"- {'met' if is_met else 'MISSED'}: {text}" for text, is_met in verdicts]
    about = (
        f"3 observers of {ENVIRONMENTS} environments, whose steps take {1e3 * STEP_S:.0f} ms; "
        f"{STEPS} steps of each in a round; time limit {TIME_LIMIT_S:g} s."
    )
    head = ["# Steps while workers are killed", "", provenance(), "", about, ""]
    report = "\n".join([*head, *aligned(table), "", *lines, ""])
    print(report)
    if options.save:
        save(report, Path(__file__).parent, options.save)
    return 0 if all(is_met for _, is_met in verdicts) else 1


def _kill_observer(table: list[str], verdicts: list[tuple[str, bool]]) -> None:
    with cluster(workers=3, restarts=1) as group:
        names = list(group.names)
        open_observers(names)
        rounds(PHASE_S / 4)
        before = rounds(PHASE_S)
        os.kill(group.pids["worker1"], signal.SIGKILL)
        during = rounds(PHASE_S)  # It stays away for longer.
        without = rounds(PHASE_S / 4)
        left_out = list(_kept["observers"].left_out)
        group.wait_for("worker1", 60.0)
        back = _kept["observers"].take_back()
        after = rounds(PHASE_S)
        close_observers()
    for name, phase in (
        ("three observers", before),
        ("the seconds after the SIGKILL of one", during),
        ("two observers", without),
        ("it takes part again", after),
    ):
        table.append(_row(name, phase))
    verdicts += [
        (f"left out: {left_out}; took part again: {back}", left_out == back == ["worker1"]),
        _kept_share("after the SIGKILL", during, before, 2 / 3),
        _kept_share("with two", without, before, 2 / 3),
        _kept_share("restarted", after, before, 1.0),
        (
            f"the longest round after the SIGKILL took {during.longest_s:.2f} s",
            during.longest_s < TIME_LIMIT_S + before.longest_s,
        ),
    ]


def _kill_agent(table: list[str], verdicts: list[tuple[str, bool]]) -> None:
    with cluster(workers=4, restarts=1) as group, tempfile.TemporaryDirectory() as folder:
        agent, *observers = group.names
        rpc.rpc_sync(agent, open_observers, (observers,))
        rpc.rpc_sync(agent, rounds, (PHASE_S / 4,))
        before = rpc.rpc_sync(agent, rounds, (PHASE_S,))
        saved = rpc.rpc_sync(agent, save_agent, (folder,))
        lost = rpc.rpc_async(agent, rounds, (60.0,), timeout=0)
        os.kill(group.pids[agent], signal.SIGKILL)
        began_s = time.perf_counter()
        with contextlib.suppress(WorkerLost):
            lost.wait()
        group.wait_for(agent, 60.0)
        version = rpc.rpc_sync(agent, resume, (observers, folder))
        away_s = time.perf_counter() - began_s
        rpc.rpc_sync(agent, rounds, (PHASE_S / 4,))
        after = rpc.rpc_sync(agent, rounds, (PHASE_S,))
        rpc.rpc_sync(agent, close_observers)
    table += [_row("the agent on a worker", before), _row("it was killed, and resumed", after)]
    verdicts += [
        (f"snapshot of version {saved}, resumed at {version}", saved == version),
        _kept_share("the agent resumed", after, before, 1.0),
        (f"away for {away_s:.1f} s, {AWAY_S:g} s of it by request", away_s < AWAY_S + 30),
    ]


def _kept_share(name: str, phase: Phase, before: Phase, expected: float) -> tuple[str, bool]:
    share = phase.rate / before.rate
    # A tenth for other programs on the machine.
    return f"{name}: {share:.2f} of the steps before (expected {expected:.2f})", (
        share >= 0.9 * expected
    )


def _row(name: str, phase: Phase) -> str:
    return f"| {name} | {phase.rate:,.0f} | {1e3 * phase.longest_s:.0f} ms |"


if __name__ == "__main__":
    # By name, not by value: workers keep what they make in this module.
    from benchmarks.reinforcement import losses

    sys.exit(losses.main())
