"""A parameter server that answers once all trainers have sent their gradients.

As in PyTorch's tutorial on batch processing with asynchronous executions: a trainer sends
gradients and gets the stepped model back; the server averages a batch of updates and blocks no
thread meanwhile. The tutorial's ResNet-50 computes for seconds; a small model shows the calls.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frame.api import current
from benchmarks.training.references import remote_method, remote_method_async, seed, seed_all

api = current()

BATCH, FEATURES, HIDDEN, CLASSES = 20, 32, 64, 10


class BatchUpdateServer:
    """Holds the model, on the first worker.

    Args:
        trainers: Number of trainers, and so of updates in a batch.
    """

    def __init__(self, trainers: int) -> None:
        self.model = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._trainers = trainers
        self._received = 0
        self._lock = threading.Lock()
        self._next_model: torch.futures.Future[nn.Module] = torch.futures.Future()
        self._optimizer.zero_grad()

    def get_model(self) -> nn.Module:
        return self.model

    @staticmethod
    @api.rpc.functions.async_execution  # type: ignore[untyped-decorator]  # known at run time
    def update_and_fetch(reference: Any, gradients: list[Tensor]) -> Any:
        """Adds a trainer's gradients; the future has the model stepped with all gradients."""
        server: BatchUpdateServer = reference.local_value()
        return server.update(gradients)

    def update(self, gradients: list[Tensor]) -> Any:
        with self._lock:
            next_model = self._next_model
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                share = gradient / self._trainers
                parameter.grad = share if parameter.grad is None else parameter.grad + share
            self._received += 1
            if self._received == self._trainers:
                self._received = 0
                self._optimizer.step()
                self._optimizer.zero_grad()
                self._next_model = torch.futures.Future()
                next_model.set_result(self.model)
        return next_model


class Trainer:
    """Computes gradients on its own worker.

    Args:
        reference: Reference to the server.
        number: Seed of this trainer's batches.
    """

    def __init__(self, reference: Any, number: int) -> None:
        seed(number)
        self._reference = reference
        self._model = remote_method(BatchUpdateServer.get_model, reference)
        self._criterion = nn.CrossEntropyLoss()

    def train(self, steps: int) -> list[float]:
        """Trains on a batch for each step; returns the losses."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        inputs, target = torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))
        loss = self._criterion(self._model(inputs), target)
        loss.backward()
        gradients = [parameter.grad for parameter in self._model.parameters()]
        self._model = api.rpc.rpc_sync(
            self._reference.owner(),
            BatchUpdateServer.update_and_fetch,
            args=(self._reference, gradients),
        )
        return float(loss)


class Training:
    """The server on the first worker, and a trainer on each other worker."""

    def __init__(self) -> None:
        seed_all()
        self._server = api.rpc.RRef(BatchUpdateServer(len(api.peers)))
        self._trainers = [
            api.rpc.remote(peer, Trainer, args=(self._server, number))
            for number, peer in enumerate(api.peers)
        ]

    def train(self, steps: int) -> list[float]:
        """Trains on all trainers; returns their losses."""
        calls = [remote_method_async(Trainer.train, trainer, steps) for trainer in self._trainers]
        return [loss for call in calls for loss in call.wait()]
