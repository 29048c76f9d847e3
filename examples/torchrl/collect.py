"""Learns CartPole from torchrl's RPC collectors: ``python -m torchweft.compat collect.py``.

This program knows nothing of Weft. Two workers collect frames with ``RPCCollector``, the second one
holds the replay buffer as well, and this process learns. Without ``-m torchweft.compat`` it runs on
``torch.distributed.rpc``.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc  # noqa: TID251 (Weft's, with -m torchweft.compat)
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer
from torchrl.envs import EnvBase, GymEnv, RewardSum, TransformedEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

OBSERVERS = 2
BUFFER_WORKER = f"COLLECTOR_NODE_{OBSERVERS}"
"""The collector names its workers; the replay buffer is on the last of them."""

KEYS = ["observation", "action", "next"]
"""What the buffer keeps of a frame."""


def make_environment() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), RewardSum())


def make_buffer(capacity: int, batch: int) -> RemoteTensorDictReplayBuffer:
    return RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=batch)


def find_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Learner:
    """Deep Q-learning with a target network.

    Args:
        options: ``learning_rate`` and ``frames``, the frames over which exploration ends.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        specs = make_environment()
        network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.actor = QValueActor(network, spec=specs.action_spec)
        self.exploring = EGreedyModule(specs.action_spec, annealing_num_steps=options.frames)
        self.policy = TensorDictSequential(self.actor, self.exploring)
        self._loss = DQNLoss(self.actor, action_space=specs.action_spec, delay_value=True)
        self._loss.make_value_estimator(gamma=0.99)
        self._target = SoftUpdate(self._loss, tau=0.01)
        self._optimizer = torch.optim.Adam(self._loss.parameters(), lr=options.learning_rate)

    def learn(self, samples: TensorDict) -> float:
        loss = self._loss(samples)["loss"]
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._target.step()
        return float(loss)


def returns_of(frames: TensorDict) -> list[float]:
    """Returns the returns of the episodes that end in these frames."""
    ends = frames["next", "done"].squeeze(-1)
    found: list[float] = frames["next", "episode_reward"][ends].squeeze(-1).tolist()
    return found


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Collects and learns; returns the figures."""
    torch.manual_seed(options.seed)
    learner = Learner(options)
    collector = RPCCollector(
        [make_environment] * OBSERVERS,
        learner.policy,
        frames_per_batch=options.batch,
        total_frames=options.frames,
        launcher="mp",
        tcp_port=str(find_port()),
    )
    buffer = rpc.remote(BUFFER_WORKER, make_buffer, (options.frames, options.batch))
    started = time.monotonic()
    returns, losses = [], []
    for frames in collector:
        returns += returns_of(frames)
        buffer.rpc_sync().extend(frames.select(*KEYS))
        samples = [buffer.rpc_async().sample() for _ in range(options.updates)]
        losses += [learner.learn(each.wait()) for each in samples]
        learner.exploring.step(frames.numel())
        collector.update_policy_weights_()
        print(f"{len(returns):4d} episodes, return {mean(returns[-20:]):6.1f}", flush=True)
    stored = rpc.rpc_sync(BUFFER_WORKER, count, (buffer,))
    seconds = time.monotonic() - started
    del buffer
    collector.shutdown()
    return {
        "rpc": rpc.__name__,
        "stored": stored,
        "returns": returns,
        "losses": losses,
        "frames_per_s": options.frames / seconds,
    }


def count(buffer: rpc.RRef) -> int:
    return len(buffer.local_value())


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=20_000, help="a multiple of the batch")
    parser.add_argument("--batch", type=int, default=200, help="frames of a batch")
    parser.add_argument("--updates", type=int, default=20, help="updates for each batch")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/torchrl"))
    options = parser.parse_args()
    figures = train(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
