"""Trainers with a layer that DDP replicates, and one embedding on a parameter server.

As in PyTorch's tutorial on combining DDP with RPC, with its sizes: a master makes the embedding, a
``RemoteModule``, and passes it to two trainers. Distributed autograd runs both backward passes.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.frame.api import current
from benchmarks.frame.group import free_port
from benchmarks.training.references import references_to_parameters, remote_method_async, seed

api = current()

EMBEDDINGS, DIMENSION, CLASSES = 100, 16, 8
TRAINERS = ("worker1", "worker2")
SERVER = "worker3"
Batch = tuple[Tensor, Tensor, Tensor]


class HybridModel(nn.Module):
    """The remote embedding, and the layer that all trainers have."""

    def __init__(self, embedding: Any, layer: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.layer = layer

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        logits: Tensor = self.layer(self.embedding.forward(indices, offsets))
        return logits


class Trainer:
    """One of the two trainers, each on its own worker.

    Args:
        embedding: The remote module.
        is_ddp: Whether DDP averages the gradients of the layer; otherwise the trainer does.
        rank: Rank among the trainers.
        address: Rendezvous address of the trainers' process group.
    """

    def __init__(self, embedding: Any, is_ddp: bool, rank: int, address: str) -> None:
        if not distributed.is_initialized():
            distributed.init_process_group(
                "gloo", rank=rank, world_size=len(TRAINERS), init_method=address
            )
            calm_gloo()
        seed(rank)
        self._batches = batches(rank)
        layer = nn.Linear(DIMENSION, CLASSES)
        self._averaged = () if is_ddp else tuple(layer.parameters())
        for parameter in self._averaged:
            distributed.broadcast(parameter.data, 0)
        self._model = HybridModel(embedding, DistributedDataParallel(layer) if is_ddp else layer)
        parameters = [*embedding.remote_parameters(), *references_to_parameters(layer)]
        self._optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
        self._criterion = nn.CrossEntropyLoss()

    def train(self, steps: int, is_in_lockstep: bool) -> list[float]:
        """Trains on a batch for each step; returns the losses.

        Args:
            steps: Number of steps.
            is_in_lockstep: Whether to wait for the other trainer's optimizer after each step, so
                that losses can be compared. Otherwise the next lookup races with that optimizer.
        """
        losses = []
        for indices, offsets, target in itertools.islice(self._batches, steps):
            with api.autograd.context() as context_id:
                loss = self._criterion(self._model(indices, offsets), target)
                api.autograd.backward(context_id, [loss])
                self._average(context_id)
                self._optimizer.step(context_id)
            losses.append(float(loss))
            if is_in_lockstep:
                distributed.barrier()
        return losses

    def _average(self, context_id: int) -> None:
        gradients = api.autograd.get_gradients(context_id) if self._averaged else {}
        for parameter in self._averaged:
            distributed.all_reduce(gradients[parameter])
            gradients[parameter] /= len(TRAINERS)


def calm_gloo() -> None:
    """Keeps gloo's thread from preempting the sending thread.

    An answer may wake gloo's thread while the sender still holds the connection's lock. Gloo's
    thread would then spin for the lock and keep the core from the sender for a whole time slice.
    An all-reduce of 256 bytes would take 2 ms instead of 0.3 on either side, more than the rest of
    a step.
    """
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().startswith("gloo_tcp"):
            os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def batches(rank: int) -> Iterator[Batch]:
    """Yields bags of random indices, with random classes."""
    numbers = random.Random(rank)
    while True:
        count = numbers.randint(20, 50)
        indices = torch.tensor([numbers.randrange(EMBEDDINGS) for _ in range(count)])
        offsets = [0]
        while (start := offsets[-1] + numbers.randint(1, 10)) < count:
            offsets.append(start)
        target = torch.tensor([numbers.randrange(CLASSES) for _ in offsets])
        yield indices, torch.tensor(offsets), target


def make_embedding() -> nn.Module:
    """Makes the embedding; called on the server."""
    seed(0)
    return nn.EmbeddingBag(EMBEDDINGS, DIMENSION, mode="sum")


class Training:
    """The master, on the first worker.

    Args:
        is_ddp: Whether the trainers use DDP.
    """

    def __init__(self, is_ddp: bool) -> None:
        embedding = api.nn.RemoteModule(SERVER, make_embedding)
        address = f"tcp://127.0.0.1:{free_port()}"
        self._trainers = [
            api.rpc.remote(name, Trainer, args=(embedding, is_ddp, rank, address))
            for rank, name in enumerate(TRAINERS)
        ]

    def train(self, steps: int, is_in_lockstep: bool = False) -> list[float]:
        """Trains on both trainers; returns their losses."""
        calls = [
            remote_method_async(Trainer.train, trainer, steps, is_in_lockstep)
            for trainer in self._trainers
        ]
        return [loss for call in calls for loss in call.wait()]
