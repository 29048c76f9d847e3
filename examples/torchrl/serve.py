"""Collectors without a policy: ``python examples/torchrl/serve.py``.

The collectors are torchrl's, on workers of their own, and ask an inference server of this process,
which is torchrl's too; its transport is Weft. A replay buffer on a third worker takes their frames.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import InteractionType, TensorDictModuleBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import QValueActor
from torchrl.modules.inference_server import (
    InferenceClient,
    InferenceServer,
    PolicyClientModule,
)
from transport import WeftTransport

import torchweft as weft
from torchweft import rpc

OBSERVERS = ["observer0", "observer1"]
BUFFER = "buffer"
BATCH = 50


def make_environment() -> GymEnv:
    return GymEnv("CartPole-v1")


def make_buffer(capacity: int) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH)


def make_policy() -> TensorDictModuleBase:
    specs = make_environment()
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    return QValueActor(network, spec=specs.action_spec)


def observe(client: InferenceClient, buffer: rpc.RRef[TensorDictReplayBuffer], count: int) -> int:
    """Collects frames with the server's policy, and gives them to the buffer; returns how many."""
    # The server refuses a batch of requests of several types, and a collector that begins makes a
    # request outside of its exploration.
    policy = PolicyClientModule(
        client,
        in_keys=["observation"],
        out_keys=["action"],
        interaction_type=InteractionType.RANDOM,
    )
    collector = Collector(make_environment, policy, frames_per_batch=BATCH, total_frames=count)
    collected = 0
    for frames in collector:
        buffer.rpc_sync().extend(frames.select("observation", "action", "next"))
        collected += frames.numel()
    collector.shutdown()
    return collected


def count_of(buffer: rpc.RRef[TensorDictReplayBuffer]) -> int:
    return len(buffer.local_value())


def run(count: int) -> dict[str, Any]:
    """Runs the observers; returns the figures."""
    torch.manual_seed(0)
    policy = make_policy()
    with weft.cluster(names=[*OBSERVERS, BUFFER]):
        buffer = rpc.remote(BUFFER, make_buffer, (len(OBSERVERS) * count,))
        transport = WeftTransport()
        with InferenceServer(policy, transport, max_batch_size=16) as server:
            calls = [
                rpc.rpc_async(name, observe, (transport.client(), buffer, count))
                for name in OBSERVERS
            ]
            collected = [call.wait() for call in calls]
            statistics = server.stats()
        samples = buffer.rpc_sync().sample()
        stored = rpc.rpc_sync(BUFFER, count_of, (buffer,))
    asked = policy(samples.select("observation"))["action"]
    return {
        "collected": collected,
        "stored": stored,
        "same_actions": bool((asked == samples["action"]).all()),
        "requests": statistics["requests"],
        "batches": statistics["batches"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=2_000, help="of each observer")
    parser.add_argument("--out", type=Path, default=Path("runs/torchrl"))
    options = parser.parse_args()
    figures = run(options.frames)
    print(json.dumps(figures, indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "served.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
