"""Learns to balance a pole: ``python train.py``, ``make demo-rl``.

Observers run the environments, and ask the agent in this process for actions. The learner takes
their trajectories, in rounds or as they come.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from choices import Options, parse_options
from drawing import SMOOTHED, SOLVED, draw_picture
from learning import A2C, DQN, Learner

import torchweft as weft
from torchweft import rpc
from torchweft.errors import WeftError
from torchweft.probe import usable_cores
from torchweft.progress import Display
from torchweft.rl import Environments, Observers, ReplayBuffer, Trajectory

ADVICE = "in the clone, pip install '.[demo-rl]'"
CAPACITY = 50_000


class Unusable(ValueError):
    """The program cannot run as requested; the message is for the user."""


@dataclass
class History:
    """The record of a training run.

    Attributes:
        steps: Environment steps.
        episodes: Steps before the end of each episode, its observer, its return.
        solved_after: Steps after which the mean of the last 20 returns was 195; 0 for never.
        seconds: Duration of the training.
    """

    steps: int = 0
    episodes: list[tuple[int, str, float]] = field(default_factory=list)
    solved_after: int = 0
    seconds: float = 0.0
    recent: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, trajectories: list[Trajectory]) -> None:
        for each in trajectories:
            self.steps += each.steps
            for episode in each.episodes:
                self.episodes.append((self.steps, each.observer, episode.reward))
                recent = self.recent.setdefault(each.observer, deque(maxlen=SMOOTHED))
                recent.append(episode.reward)
        if not self.solved_after and self.mean_return() >= SOLVED:
            self.solved_after = self.steps

    def mean_return(self) -> float:
        """Returns the mean of the last 20 returns; 0 before there are 20."""
        last = [reward for _, _, reward in self.episodes[-SMOOTHED:]]
        return sum(last) / SMOOTHED if len(last) == SMOOTHED else 0.0

    def by_observer(self) -> dict[str, float]:
        return {name: sum(each) / len(each) for name, each in sorted(self.recent.items())}


def make_folder(path: Path | None) -> Path:
    """Creates the folder for the results if it is missing."""
    path = path or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "figures.json").touch()
    except OSError as error:
        raise Unusable(f"{path} cannot be written to: {error.strerror}") from error
    (path / "figures.json").unlink()
    return path


@contextlib.contextmanager
def started(options: Options) -> Iterator[tuple[str | list[str], str]]:
    """Starts the workers, if any; yields where observers run, and the worker of the buffer."""
    if options.where != "workers":
        yield options.where, ""
        return
    has_buffer = options.algorithm == "dqn"
    with weft.cluster(workers=options.observers + has_buffer) as cluster:
        names = list(cluster.names)
        for name in names:
            rpc.rpc_sync(name, torch.set_num_threads, args=(1,))
        yield names[: options.observers], names[-1] if has_buffer else ""


def make_learner(options: Options, buffer_on: str) -> Learner:
    """Makes the algorithm; the replay buffer has a worker of its own, if there are workers."""
    count = options.observers * options.environments
    if options.algorithm == "a2c":
        return A2C(count, options.seed)
    given = {"priority_power": 0.6, "seed": options.seed}
    if buffer_on:
        return DQN(count, options.seed, rpc.remote(buffer_on, ReplayBuffer, (CAPACITY,), given))
    return DQN(count, options.seed, ReplayBuffer(CAPACITY, **given))


def run(options: Options, history: History) -> None:
    """Trains, and writes figures and a picture."""
    folder = make_folder(options.out)
    torch.set_num_threads(1)  # The network is small, and the observers need the cores.
    environments = Environments("CartPole-v1", options.environments, seed=1000 * options.seed)
    with started(options) as (where, buffer_on):
        learner = make_learner(options, buffer_on)
        with Observers(
            where, environments, learner.agent, count=options.observers, steps=options.unroll,
            full_batches=not options.stream,
        ) as observers:  # fmt: skip
            train(observers, learner, options, history)
            figures = make_figures(options, history, learner, observers)
    print(summary(figures))
    write_results(figures, folder)


def train(observers: Observers, learner: Learner, options: Options, history: History) -> None:
    """Learns until there are enough steps."""
    began_s = time.monotonic()
    stream = observers.stream() if options.stream else None
    with Display(options.steps, "step") as shown:
        while (before := history.steps) < options.steps:
            found = observers.round() if stream is None else [next(stream)]
            history.add(found)
            learner.learn(found)
            history.seconds = time.monotonic() - began_s
            returns = {name: round(mean) for name, mean in history.by_observer().items()}
            shown.step(history.steps - before, **returns)
            if options.until_solved and history.solved_after:
                break


def make_figures(
    options: Options, history: History, learner: Learner, observers: Observers
) -> dict[str, Any]:
    """Returns all figures, as JSON has them."""
    policy, batches = learner.agent.policy, learner.agent.statistics()
    return {
        "options": {**asdict(options), "out": None if options.out is None else str(options.out)},
        "cores": len(usable_cores()),
        "steps": history.steps,
        "seconds": history.seconds,
        "steps_per_s": history.steps / history.seconds,
        "mean_return": history.mean_return(),
        "returns_by_observer": history.by_observer(),
        "solved_after_steps": history.solved_after,
        "policy_forwards": policy.forwards,
        "policy_version": policy.version,
        "steps_per_forward": policy.decisions / policy.forwards,
        "batch_sizes": batches.sizes,
        "staleness": observers.staleness,
        "episodes": history.episodes,
    }


def summary(figures: dict[str, Any]) -> str:
    """Returns the results as text."""
    after = figures["solved_after_steps"]
    solved = f"{SOLVED} after {after:,} steps" if after else f"{SOLVED} was not reached"
    return (
        f"{figures['steps']:,} steps in {figures['seconds']:.0f} s: "
        f"{figures['steps_per_s']:,.0f} steps/s\n"
        f"mean return of the last {SMOOTHED} episodes: {figures['mean_return']:.0f}; {solved}\n"
        f"{figures['policy_forwards']:,} forward passes, {figures['steps_per_forward']:.1f} "
        f"steps each; calls in a batch: {figures['batch_sizes']}; "
        f"staleness: {figures['staleness']}"
    )


def write_results(figures: dict[str, Any], folder: Path) -> None:
    """Writes the figures and the picture, and prints which files were written."""
    text = json.dumps(figures, indent=1)
    (folder / "figures.json").write_text(text + "\n", encoding="utf-8")
    written = "figures.json"
    try:
        title = figures["options"]["algorithm"].upper()
        draw_picture(figures["episodes"], title, folder / "returns.png")
        written = "returns.png and " + written
    except ImportError:
        print(f"no picture was drawn: matplotlib is missing ({ADVICE})")
    print(f"{written} in {folder}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    options = parse_options(arguments)
    history = History()
    try:
        run(options, history)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped after {history.steps:,} steps; nothing was kept")
        return 130
    except WeftError as error:
        print(f"error after {history.steps:,} steps: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
