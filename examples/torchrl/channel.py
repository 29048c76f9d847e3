"""Any service of torchrl for workers: ``python examples/torchrl/channel.py``.

torchrl's ``ChannelServer`` answers requests in batches, for whatever transport brings them. Here
it keeps the mean of all observations, and two workers ask it. The transport is Weft. torchrl 0.14
keeps these classes in a module whose name begins with an underscore: they may change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl._comm.request_reply import (
    ChannelServer,
    Message,
    RequestReplyClient,
    RequestReplyTransport,
)
from torchrl.modules.inference_server import ThreadingTransport
from transport import Answering, Asking

import torchweft as weft
from torchweft import rpc


class WeftChannel(Answering, RequestReplyTransport):
    """Requests of this and of other workers, with metadata, for a ``ChannelServer``."""

    supports_metadata = True

    def __init__(self) -> None:
        self._waiting = ThreadingTransport()

    def submit(self, payload: TensorDictBase, *, metadata: Any = None) -> Future[TensorDictBase]:
        return self._waiting.submit(Message(payload, metadata or {}))

    def drain(self, max_items: int) -> Any:
        return self._waiting.drain(max_items)

    def drain_with_timing(self, max_items: int) -> Any:
        return self._waiting.drain_with_timing(max_items)

    def wait_for_work(self, timeout: float) -> None:
        self._waiting.wait_for_work(timeout)

    def resolve(self, callback: Any, result: TensorDictBase) -> None:
        self._waiting.resolve(callback, result)

    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        self._waiting.resolve_exception(callback, exc)

    def client(self) -> RequestReplyClient:
        return RequestReplyClient(Asking(rpc.RRef(self)))


class Means:
    """Answers each request with the mean of all observations so far."""

    def __init__(self) -> None:
        self._sum, self._count = torch.zeros(4, dtype=torch.float64), 0

    def __call__(self, messages: Sequence[Message]) -> list[TensorDict]:
        for message in messages:
            if message.payload["observation"].shape[-1] != 4:
                raise ValueError(f"{message.metadata['observer']} sent other observations")
            self._sum += message.payload["observation"].sum(0)
            self._count += message.metadata["count"]
        return [TensorDict({"mean": self._sum / self._count}) for _ in messages]


def observe(client: RequestReplyClient, name: str, seed: int, count: int) -> list[float]:
    """Sends observations; returns the last mean, and where the server refused a request."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        answer = client(
            TensorDict({"observation": drawn}), 60.0, metadata={"count": 8, "observer": name}
        )
    found: list[float] = answer["mean"].tolist()
    return found


def refusal(client: RequestReplyClient) -> str:
    """Returns the error of a request that does not fit."""
    try:
        client(TensorDict({"observation": torch.ones(1, 3)}), 60.0, metadata={"observer": "me"})
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100, help="of each observer")
    parser.add_argument("--out", type=Path, default=Path("runs/torchrl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with weft.cluster(workers=2) as cluster:
        channel = WeftChannel()
        with ChannelServer(channel, Means()) as server:
            calls = [
                rpc.rpc_async(name, observe, (server.client(), name, seed, options.requests))
                for seed, name in enumerate(cluster.names)
            ]
            means = [call.wait() for call in calls]
            refused = rpc.rpc_sync("worker0", refusal, (server.client(),))
            statistics = server.stats()
    figures = {"means": means, "refused": refused, **statistics}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "channel.json").write_text(json.dumps(figures, indent=1))
    print(f"{statistics['requests']} requests, {statistics['avg_batch_size']:.1f} at a time")
    print(f"refused: {refused}")


if __name__ == "__main__":
    main()
