"""Environment steps of ``torchweft.rl`` beside those of RLlib, in turns; see the README."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.frame.report import provenance
from benchmarks.frame.run import end_on_sigterm, save
from benchmarks.frame.summary import aligned
from benchmarks.reinforcement.native import HIDDEN, NATIVE, OBSERVERS, STEPS, observers_of
from torchweft import cluster

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STORE_BYTES = 200 << 20


class Round(NamedTuple):
    """One turn of a side.

    Attributes:
        steps: Environment steps, without mere resets.
        seconds: Wall-clock time.
        cpu_s: CPU time of all processes of the side, with this one.
    """

    steps: int
    seconds: float
    cpu_s: float


def main() -> int:
    """Measures in turns; returns 1 if Weft takes fewer steps per second."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reinforcement.rllib", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--save", metavar="NAME", help="also write results/<date>-NAME.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Round]] = {"torchweft.rl": [], "RLlib": []}
    # Ray first: its processes must not be taken for those of the cluster.
    with _rllib() as sample, _weft() as (collect, pids):
        rays = _descendants(os.getpid()) - pids
        sides = {"torchweft.rl": (collect, pids), "RLlib": (sample, rays)}
        for name, (run, _) in sides.items():
            print(f"warming up {name}", file=sys.stderr, flush=True)
            run()
            run()
        for _ in range(options.rounds):
            for name, (run, processes) in sides.items():
                found[name].append(_measured(run, processes | {os.getpid()}))
    report = _report(found)
    print(report)
    if options.save:
        save(report, Path(__file__).parent, options.save)
    ours, theirs = (_median(rounds, _rate) for rounds in found.values())
    return 0 if ours >= theirs else 1


@contextlib.contextmanager
def _weft() -> Iterator[tuple[Callable[[], int], set[int]]]:
    with cluster(workers=OBSERVERS) as group:
        observers = observers_of(list(group.names))

        def collect() -> int:
            found = observers.round()
            assert len(found) == OBSERVERS, observers.left_out
            return sum(each.steps for each in found)

        try:
            yield collect, set(group.pids.values())
        finally:
            observers.close()


@contextlib.contextmanager
def _rllib() -> Iterator[Callable[[], int]]:
    """Starts RLlib's env runners, each with vector environments and a copy of the policy."""
    gymnasium: Any = importlib.import_module("gymnasium")
    ray: Any = importlib.import_module("ray")
    ppo: Any = importlib.import_module("ray.rllib.algorithms.ppo")
    modules: Any = importlib.import_module("ray.rllib.core.rl_module.default_model_config")
    ray.init(
        num_cpus=OBSERVERS + 1,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=_STORE_BYTES,
    )
    try:
        model = modules.DefaultModelConfig(
            fcnet_hiddens=[HIDDEN], fcnet_activation="relu", vf_share_layers=False
        )
        config = (
            ppo.PPOConfig()
            .environment("CartPole-v1")
            .rl_module(model_config=model)
            .env_runners(
                num_env_runners=OBSERVERS,
                num_envs_per_env_runner=NATIVE,
                gym_env_vectorize_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT,
                rollout_fragment_length=STEPS,
                batch_mode="truncate_episodes",
            )
            .training(train_batch_size_per_learner=OBSERVERS * NATIVE * STEPS)
        )
        algorithm = config.build_algo()
        group = algorithm.env_runner_group
        group.foreach_env_runner(_use_one_thread, local_env_runner=False)

        def sample() -> int:
            counts = group.foreach_env_runner(_sample, local_env_runner=False)
            assert len(counts) == OBSERVERS, "an env runner failed"
            return sum(counts)

        yield sample
        algorithm.stop()
    finally:
        ray.shutdown()


def _use_one_thread(_: Any) -> None:
    torch.set_num_threads(1)


def _sample(runner: Any) -> int:
    """Runs on an env runner: the episodes stay there, so that nothing but steps is measured."""
    episodes = runner.sample(num_timesteps=STEPS * NATIVE, random_actions=False)
    return sum(len(each) for each in episodes)


def _measured(run: Callable[[], int], pids: set[int]) -> Round:
    cpu_s, began_s = _cpu_s(pids), time.perf_counter()
    steps = run()
    seconds = time.perf_counter() - began_s
    return Round(steps, seconds, _cpu_s(pids) - cpu_s)


def _cpu_s(pids: set[int]) -> float:
    """Returns the CPU time of processes, to 10 ms each."""
    found = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += _TICK_S * (int(fields[11]) + int(fields[12]))
    return found


def _descendants(pid: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def _rate(one: Round) -> float:
    return one.steps / one.seconds


def _cpu_us(one: Round) -> float:
    return 1e6 * one.cpu_s / one.steps


def _median(rounds: list[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(map(value, rounds))


def _report(found: dict[str, list[Round]]) -> str:
    table = ["| | steps a second | worst | best | CPU a step |", "|---|---:|---:|---:|---:|"]
    for name, rounds in found.items():
        rates = [_rate(each) for each in rounds]
        cells = [_median(rounds, _rate), min(rates), max(rates)]
        texts = [f"{each:,.0f}" for each in cells] + [f"{_median(rounds, _cpu_us):.2f} us"]
        table.append(f"| {name} | {' | '.join(texts)} |")
    ours, theirs = found.values()
    rate = _median(ours, _rate) / _median(theirs, _rate)
    cpu = _median(theirs, _cpu_us) / _median(ours, _cpu_us)
    return "\n".join(
        [
            "# Environment steps beside RLlib",
            "",
            provenance(),
            "",
            f"{OBSERVERS} observers, or env runners, of {NATIVE} native vectorized CartPole "
            f"environments each; {STEPS} steps of each environment in a turn; {len(ours)} turns "
            f"of each side, one after the other. ray {importlib.import_module('ray').__version__}.",
            "",
            *aligned(table),
            "",
            f"Weft takes {rate:.2f} times as many steps a second, with 1/{cpu:.2f} of the CPU.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
