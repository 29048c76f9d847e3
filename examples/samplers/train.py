"""Trains a small language model by reinforcement learning: ``python examples/samplers/train.py``.

Two samplers of different speed generate texts, and this program, the learner, takes them as they
come and publishes its weights after each step. Nobody waits for weights.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from samplers import Model, Sampler, Samples, reward_of

import torchweft as weft
from torchweft import rpc
from torchweft.errors import WeftError
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


def pass_on(stream: rpc.Stream[Samples], place: int, into: queue.Queue[Any]) -> None:
    """Puts the samples of one sampler where the learner takes them as they come."""
    try:
        for samples in stream:
            into.put((place, samples))
    except WeftError as error:
        into.put((place, error))


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains, prints the progress, and returns the figures."""
    learner = Learner(options.learning_rate)
    reference = rpc.RRef(learner.publisher)
    samplers = [rpc.remote(name, Sampler, (reference, n)) for n, name in enumerate(WORKERS)]
    arrived: queue.Queue[Any] = queue.Queue(maxsize=2)
    pauses = [0.0, options.pause]
    streams = [
        rpc.stream(each, Sampler.samples, (options.batch, pause_s), ahead=1)
        for each, pause_s in zip(samplers, pauses, strict=True)
    ]
    threads = [
        threading.Thread(target=pass_on, args=(stream, place, arrived), daemon=True)
        for place, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    rewards: list[float] = []
    ages: list[int] = []
    updates: list[float] = []
    batches: list[float] = []
    counts: Counter[str] = Counter()
    began_s = time.monotonic()
    for step in range(1, options.steps + 1):
        place, samples = arrived.get(timeout=60.0)
        if isinstance(samples, WeftError):
            raise samples
        ages.append(learner.publisher.version - samples.version)
        rewards.append(learner.learn(samples))
        counts[WORKERS[place]] += 1
        updates.append(samples.update_s)
        batches.append(samples.seconds)
        if step % max(1, options.steps // 10) == 0:
            print(
                f"step {step}: reward {rewards[-1]:.2f}, texts {ages[-1]} versions old, "
                f"{', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}",
                flush=True,
            )
    seconds = time.monotonic() - began_s
    for stream in streams:
        stream.close()
    for each in samplers:
        each.rpc_sync().close()
    drain(threads, arrived)
    published = learner.publisher.statistics()
    return {
        "rewards": rewards,
        "ages": ages,
        "batches": dict(counts),
        "texts_per_s": options.batch * options.steps / seconds,
        "longest_update_s": max(updates),
        "median_batch_s": sorted(batches)[len(batches) // 2],
        "published": published._asdict(),
    }


def drain(threads: list[threading.Thread], arrived: queue.Queue[Any]) -> None:
    """Lets the threads end, which may wait for room."""
    for thread in threads:
        while thread.is_alive():
            try:
                arrived.get(timeout=0.05)
            except queue.Empty:
                pass


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
    with weft.cluster(workers=2, name="learner"):
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
