"""Trains a small language model by reinforcement learning: ``python examples/samplers/train.py``.

Two samplers of different speed generate texts, and this program, the learner, takes them as they
come and publishes its weights after each step. Nobody waits for weights. A sampler that is lost is
left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from samplers import Model, Sampler, Samples, reward_of

import torchweft as weft
from torchweft import rpc
from torchweft.errors import WorkerLost
from torchweft.weights import Publisher

WORKERS = ["worker0", "worker1"]
CLIP = 2.0
"""The largest weight of a letter that the present weights find likelier than its own did."""


class Learner:
    """The model, its optimizer, and the versions of its weights.

    Args:
        learning_rate: That of Adam.
    """

    def __init__(self, learning_rate: float) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self.publisher = Publisher(self.model)
        self.publisher.publish()

    def learn(self, samples: Samples) -> float:
        """Makes a step, which corrects for the age of the samples; returns the mean reward."""
        rewards = reward_of(samples.texts)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        logs = self.model.log_chances(samples.texts)
        ratios = (logs.detach() - samples.log_chances).exp().clamp(max=CLIP)
        loss = -(ratios * logs * advantages[:, None]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.publisher.publish()
        return float(rewards.mean())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, prints the progress, and returns the figures."""
    learner = Learner(options.learning_rate)
    reference = rpc.RRef(learner.publisher)
    samplers = [rpc.remote(name, Sampler, (reference, n)) for n, name in enumerate(WORKERS)]
    pauses = [0.0, options.pause]
    streams = [
        rpc.stream(each, Sampler.samples, (options.batch, pause_s), ahead=1, timeout=60.0)
        for each, pause_s in zip(samplers, pauses, strict=True)
    ]
    rewards: list[float] = []
    ages: list[int] = []
    updates: list[float] = []
    batches: list[float] = []
    counts: Counter[str] = Counter()
    lost: list[str] = []

    def leave_out(stream: rpc.Stream[Samples], error: Exception) -> None:
        if not isinstance(error, WorkerLost):
            raise error
        lost.append(stream.worker_name)
        print(f"{stream.worker_name} is left out: {error}", file=sys.stderr)

    began_s = time.monotonic()
    arrived = rpc.merged(streams, failed=leave_out)
    for step, (stream, samples) in enumerate(islice(arrived, options.steps), 1):
        ages.append(learner.publisher.version - samples.version)
        rewards.append(learner.learn(samples))
        counts[stream.worker_name] += 1
        updates.append(samples.update_s)
        batches.append(samples.seconds)
        if step % max(1, options.steps // 10) == 0:
            print(
                f"step {step}: reward {rewards[-1]:.2f}, texts {ages[-1]} versions old, "
                f"{', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}",
                flush=True,
            )
    seconds = time.monotonic() - began_s
    arrived.close()
    if not rewards:
        raise SystemExit("no sampler is left")
    for each in samplers:
        with contextlib.suppress(WorkerLost):
            each.rpc_sync().close()
    published = learner.publisher.statistics()
    return {
        "rewards": rewards,
        "ages": ages,
        "batches": dict(counts),
        "lost": lost,
        "texts_per_s": options.batch * len(rewards) / seconds,
        "longest_update_s": max(updates),
        "median_batch_s": sorted(batches)[len(batches) // 2],
        "published": dataclasses.asdict(published),
    }


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of the learner")
    parser.add_argument("--batch", type=int, default=64, help="texts of a step")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--pause", type=float, default=0.05, help="of the slower sampler, s")
    parser.add_argument("--out", type=Path, help="folder for figures.json; default: runs/TIME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with weft.cluster(workers=2, name="learner", check=False) as group:
        print("samplers:", ", ".join(f"{name} (process {pid})" for name, pid in group.pids.items()))
        figures = train(options)
    folder = options.out or Path("runs") / time.strftime("%Y-%m-%d-%H-%M-%S")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    (folder / "figures.json").write_text(json.dumps({"settings": settings, **figures}, indent=1))
    print(
        f"reward {figures['rewards'][0]:.2f} to {figures['rewards'][-1]:.2f}; figures in {folder}"
    )


if __name__ == "__main__":
    main()
