"""A trainer whose weights change as by Adam, and samplers that use them without a pause."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import NamedTuple

import torch
from torch import nn

from torchweft import rpc
from torchweft.agent.current import current
from torchweft.channel.table import ChannelKind
from torchweft.errors import WorkerLost
from torchweft.rpc import RRef
from torchweft.weights import Publisher, Subscriber

WIDTH = 1024
BATCH = 4
RATE = 1e-6
LIMIT_S = 120.0


def model_of(size_bytes: int) -> nn.Sequential:
    """Returns layers that have about so many bytes in bfloat16."""
    layers = max(1, round(size_bytes / (2 * WIDTH * WIDTH)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.02)
    return model


class Trainer:
    """Weights in float32, and the steps of Adam on random gradients."""

    def __init__(self, size_bytes: int, deltas: int = 0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = model_of(size_bytes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        self.publisher = Publisher(self.model, dtype=torch.bfloat16, deltas=deltas)
        self.size_bytes = sum(2 * each.numel() for each in self.model.parameters())

    def reference(self) -> RRef[Publisher]:
        return RRef(self.publisher)

    def step(self) -> int:
        for weight in self.model.parameters():
            weight.grad = torch.randn_like(weight)
        self.optimizer.step()
        return self.publisher.publish()

    def sums(self) -> list[int]:
        """Returns the checksum of each tensor, as it is published."""
        return [_sum(each.detach().to(torch.bfloat16)) for each in self.model.parameters()]


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.contiguous().view(torch.int16).to(torch.int64).sum())


class Pauses(NamedTuple):
    """The batches of a sampler since it was asked last.

    Attributes:
        batches: How many.
        batch_s: Median seconds of one, without the update.
        longest_batch_s: Seconds of the longest.
        longest_update_s: Seconds of the longest update that put a version in.
        versions: Versions that were put in.
        deltas: Those of them that came as deltas.
    """

    batches: int
    batch_s: float
    longest_batch_s: float
    longest_update_s: float
    versions: int
    deltas: int


class Sampler:
    """Runs batches in a thread, and updates its weights between two of them."""

    def __init__(self, publisher: RRef[Publisher], size_bytes: int) -> None:
        torch.set_num_threads(1)
        self.model = model_of(size_bytes).to(torch.bfloat16)
        self.subscriber = Subscriber(publisher, self.model)
        self._inputs = torch.randn(BATCH, WIDTH, dtype=torch.bfloat16)
        self._is_ending = False
        self._times: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def begin(self) -> int:
        version = self.subscriber.update(LIMIT_S)
        self._thread.start()
        return version

    def _run(self) -> None:
        while not self._is_ending:
            began_s = time.perf_counter()
            before = self.subscriber.version
            after = self.subscriber.update()
            updated_s = time.perf_counter()
            with torch.no_grad():
                self.model(self._inputs)
            update_s = updated_s - began_s if after != before else 0.0
            self._times.append((update_s, time.perf_counter() - updated_s))

    def await_version(self, version: int) -> None:
        """Returns when the weights are in use; batches go on."""
        end_s = time.monotonic() + LIMIT_S
        while self.subscriber.version != version:
            if time.monotonic() > end_s:
                raise TimeoutError(f"version {version} has not come")
            time.sleep(0.002)

    def end(self) -> tuple[int, list[int]]:
        """Stops the batches; returns the version, and the checksum of each tensor."""
        self._is_ending = True
        self._thread.join()
        self.subscriber.update()
        return self.subscriber.version, [_sum(each.detach()) for each in self.model.parameters()]

    def pauses(self) -> Pauses:
        times, counts = self._times[:], self.subscriber.statistics()
        batches = sorted(batch_s for _, batch_s in times)
        return Pauses(
            len(times),
            batches[len(batches) // 2],
            batches[-1],
            max(update_s for update_s, _ in times),
            counts.versions,
            counts.deltas,
        )

    def close(self) -> None:
        self.subscriber.close()


def forbid(peer: str) -> None:
    """Makes tensors for a peer travel over the connection of its messages."""
    channels = current().find(peer).channels
    # Behind the message: only there do the counters follow the bytes as they come.
    for kind in (ChannelKind.SHM, ChannelKind.CMA, ChannelKind.STRIPED):
        channels.disable(kind, "measured as between hosts")


def fill_and_publish(trainer: RRef[Trainer]) -> None:
    """Publishes a version of which every value is its number."""
    found = trainer.local_value()
    with torch.no_grad():
        for weight in found.model.parameters():
            weight.fill_(found.publisher.version + 1)
    found.publisher.publish()


def kill_in_transfer(worker: str, pid: int, size_bytes: int, share: float) -> tuple[int, bool]:
    """Kills a trainer when a share of a version has arrived here.

    Returns:
        The version that is in use after that, and whether all of its values are its own.
    """
    trainer = rpc.remote(worker, Trainer, (size_bytes,))
    model = model_of(size_bytes).to(torch.bfloat16)
    subscriber = Subscriber(trainer.rpc_sync().reference(), model)
    rpc.rpc_sync(worker, fill_and_publish, (trainer,))
    subscriber.update(LIMIT_S)
    enough = rpc.traffic().bytes_received + share * size_bytes
    publishing = rpc.rpc_async(worker, fill_and_publish, (trainer,))
    end_s = time.monotonic() + LIMIT_S
    while rpc.traffic().bytes_received < enough and time.monotonic() < end_s:
        time.sleep(0)
    os.kill(pid, signal.SIGKILL)
    try:
        publishing.wait()
    except WorkerLost:
        pass
    try:
        subscriber.update(LIMIT_S)  # The second version, if it has arrived.
    except WorkerLost:
        pass
    version = subscriber.version
    is_whole = all(bool((each == version).all()) for each in model.parameters())
    subscriber.close()
    return version, is_whole
