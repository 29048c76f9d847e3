"""Steps all trainers together, as if one trainer had read all their batches.

One distributed autograd context spans a step. Every trainer computes its loss, and one backward
pass runs from the mean of the losses through the trainers and the server. Then the server sums the
gradients of the LSTM copies, and the optimizer steps each parameter on the worker where it lives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from data import Corpus
from model import (
    Decoder,
    EmbeddingTable,
    GradientSum,
    Traffic,
    Trainer,
    prepare_worker,
    set_training,
)
from settings import Settings
from torch import nn
from torch.futures import wait_all

from torchweft import autograd, rpc
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer


@dataclass(frozen=True)
class StepReport:
    """The result of one step: each trainer's loss and traffic so far, and the step's duration."""

    losses: list[float]
    traffic: list[Traffic]
    seconds: float


class SynchronousTraining:
    """Owns the model's parts on the workers, and steps them.

    Args:
        server: Name of the worker that holds the embedding table and the decoder.
        trainers: Names of the workers that train.
        corpus: The text, laid out for this number of trainers.
        settings: Sizes and rates.
        optimizer_type: The local optimizer to run on every worker.
        dtype: Type of all parameters.
        device: Device of every worker on which its part of the model lives.
    """

    def __init__(
        self,
        server: str,
        trainers: Sequence[str],
        corpus: Corpus,
        settings: Settings,
        optimizer_type: type[torch.optim.Optimizer] = torch.optim.Adam,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        for number, worker in enumerate([server, *trainers]):
            rpc.rpc_sync(worker, prepare_worker, args=(settings.seed + number, 1))
        vocabulary, dropout = len(corpus.words), settings.dropout
        self._server = server
        place = f"{server}/{device}"
        self._embedding = RemoteModule(
            place, EmbeddingTable, args=(vocabulary, settings.embedding, dropout, dtype)
        )
        self._decoder = RemoteModule(
            place, Decoder, args=(vocabulary, settings.hidden, dropout, dtype)
        )
        self._trainers = self._place_trainers(trainers, corpus, settings, dtype, device)
        parameters = self._embedding.remote_parameters() + self._decoder.remote_parameters()
        for trainer in self._trainers:
            parameters += trainer.rpc_sync().parameter_rrefs()
        self._optimizer = DistributedOptimizer(
            optimizer_type, parameters, lr=settings.learning_rate
        )
        self.rows = range(0, len(corpus.training) - settings.window, settings.window)

    def _place_trainers(
        self,
        names: Sequence[str],
        corpus: Corpus,
        settings: Settings,
        dtype: torch.dtype,
        device: str,
    ) -> list[rpc.RRef[Trainer]]:
        torch.manual_seed(settings.seed)
        lstm = nn.LSTM(settings.embedding, settings.hidden, dtype=dtype).to(device)
        gradient_sum = None
        if len(names) > 1:
            gradient_sum = rpc.remote(self._server, GradientSum, args=(len(names),))
        training = corpus.training.to(device).chunk(len(names), dim=1)
        held_out = corpus.held_out.to(device).chunk(len(names), dim=1)
        modules = (lstm, self._embedding, self._decoder, gradient_sum)
        reading = (settings.window, settings.logits_travel)
        return [
            rpc.remote(
                name,
                Trainer,
                args=(number, *modules, training[number], held_out[number], *reading),
            )
            for number, name in enumerate(names)
        ]

    def step(self, row: int) -> StepReport:
        """Trains on the window that starts at ``row`` in all columns of all trainers."""
        started = time.perf_counter()
        with autograd.context() as context_id:
            losses = wait_all([t.rpc_async().training_loss(row) for t in self._trainers])
            # All trainers read the same number of words, so the mean of means is the mean.
            autograd.backward(context_id, [torch.stack(losses).mean()])
            traffic = wait_all([t.rpc_async().share_gradients(context_id) for t in self._trainers])
            self._optimizer.step(context_id)
        seconds = time.perf_counter() - started
        return StepReport([loss.item() for loss in losses], traffic, seconds)

    def held_out_perplexity(self) -> float:
        """Returns the perplexity on the held-out text, without dropout."""
        self._set_training(False)
        parts = wait_all([t.rpc_async().held_out_loss() for t in self._trainers])
        self._set_training(True)
        return math.exp(sum(loss for loss, _ in parts) / sum(words for _, words in parts))

    def state(self) -> dict[str, Any]:
        """Returns the whole model, as of the last step."""
        return {
            "embedding": self._embedding.get_module_rref().rpc_sync().state_dict(),
            "decoder": self._decoder.get_module_rref().rpc_sync().state_dict(),
            "trainers": wait_all([t.rpc_async().state() for t in self._trainers]),
            "optimizer": self._optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores a model that ``state`` returned."""
        self._embedding.get_module_rref().rpc_sync().load_state_dict(state["embedding"])
        self._decoder.get_module_rref().rpc_sync().load_state_dict(state["decoder"])
        for trainer, trainer_state in zip(self._trainers, state["trainers"], strict=True):
            trainer.rpc_sync().load(trainer_state)
        self._optimizer.load_state_dict(state["optimizer"])

    def _set_training(self, is_training: bool) -> None:
        for module in (self._embedding, self._decoder):
            rpc.rpc_sync(self._server, set_training, args=(module.get_module_rref(), is_training))
