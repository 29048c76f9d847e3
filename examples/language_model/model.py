"""The parts of the model, and the workers that they live on.

::

    trainer                          server
    words          ── tokens ──────► EmbeddingTable
    LSTM           ◄─ embeddings ─── (batch * window * E numbers)
    LSTM           ── outputs ─────► Decoder, and the loss
    loss           ◄─ one number ──  (batch * window * H numbers went up)

In the backward pass, gradients of the same sizes travel the other way. The vocabulary-sized logits
never leave the server, except with ``--logits-travel``. Every trainer has its own copy of the LSTM.
After each backward pass the server sums the copies' gradients, so that the same optimizer step
keeps the copies equal.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from torchweft import autograd, rpc
from torchweft.nn import RemoteModule

INITIAL_SPREAD = 0.1


class EmbeddingTable(nn.Module):
    """Looks words up; lives on the server."""

    def __init__(self, vocabulary: int, embedding: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, embedding, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.table.weight, -INITIAL_SPREAD, INITIAL_SPREAD)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training):  # no graph is kept for held-out text
            embeddings: Tensor = self.dropout(self.table(tokens))
            return embeddings


class Decoder(nn.Module):
    """Predicts the next word from the LSTM's outputs; lives on the server."""

    def __init__(self, vocabulary: int, hidden: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(hidden, vocabulary, dtype=dtype)
        nn.init.uniform_(self.linear.weight, -INITIAL_SPREAD, INITIAL_SPREAD)
        nn.init.zeros_(self.linear.bias)

    def forward(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Returns the mean loss if targets are given, otherwise the logits."""
        with torch.set_grad_enabled(self.training):
            logits: Tensor = self.linear(self.dropout(outputs))
            return logits if targets is None else mean_loss(logits, targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy over all positions, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GradientSum:
    """Sums the gradients of the trainers' LSTM copies; lives on the server."""

    def __init__(self, trainers: int) -> None:
        self._trainers = trainers
        self._lock = threading.Lock()
        self._parts: dict[int, list[Tensor]] = {}
        self._total: Future[list[Tensor]] = Future()

    @rpc.functions.async_execution  # no thread of the server waits for the other trainers
    def add(self, trainer: int, gradients: list[Tensor]) -> Future[list[Tensor]]:
        """Adds one trainer's gradients; the future has the sums once all trainers have called."""
        with self._lock:
            self._parts[trainer] = gradients
            total, parts = self._total, self._parts
            if len(parts) < self._trainers:
                return total
            self._total, self._parts = Future(), {}
        # Sum in the order of the trainers, so that a run is reproducible bit for bit.
        in_order = [parts[number] for number in sorted(parts)]
        total.set_result([torch.stack(same).sum(0) for same in zip(*in_order, strict=True)])
        return total


@dataclass
class Traffic:
    """Counts the bytes that this worker sent and received, by purpose."""

    sent: int = 0
    received: int = 0
    by_purpose: dict[str, int] = field(default_factory=dict)

    def book(self, purpose: str) -> None:
        """Books all bytes since the last call under ``purpose``."""
        now = rpc.traffic()
        moved = now.bytes_sent - self.sent + now.bytes_received - self.received
        self.by_purpose[purpose] = self.by_purpose.get(purpose, 0) + moved
        self.sent, self.received = now.bytes_sent, now.bytes_received


class Trainer:
    """Reads its own columns of the text with its own copy of the LSTM; lives on a trainer.

    Args:
        number: Index of this trainer, from 0.
        lstm: The initial LSTM; every trainer receives the same one.
        embedding: The embedding table on the server.
        decoder: The decoder on the server.
        gradient_sum: A reference to the ``GradientSum`` on the server; None for a single trainer.
        training: Tokens to train on, shape ``(rows, batch)``.
        held_out: Tokens to test on, shape ``(rows, columns)``.
        window: Rows that are read in one step.
        do_logits_travel: Whether the server sends the logits and the trainer computes the loss.
    """

    def __init__(
        self,
        number: int,
        lstm: nn.LSTM,
        embedding: RemoteModule,
        decoder: RemoteModule,
        gradient_sum: rpc.RRef[GradientSum] | None,
        training: Tensor,
        held_out: Tensor,
        window: int,
        do_logits_travel: bool,
    ) -> None:
        self._number = number
        self._lstm = lstm
        self._embedding = embedding
        self._decoder = decoder
        self._gradient_sum = gradient_sum
        self._training = training
        self._held_out = held_out
        self._window = window
        self._do_logits_travel = do_logits_travel
        self._hidden: tuple[Tensor, Tensor] | None = None
        self._traffic = Traffic()

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Returns references to the parameters of this copy of the LSTM."""
        return [rpc.RRef(parameter) for parameter in self._lstm.parameters()]

    def training_loss(self, row: int) -> Tensor:
        """Reads the window that starts at ``row`` and returns its mean loss."""
        self._traffic.book("control")
        if row == 0:
            self._hidden = None
        loss, hidden = self._read(self._training, row, self._hidden)
        # The hidden state continues from the last window; gradients do not.
        self._hidden = (hidden[0].detach(), hidden[1].detach())
        return loss

    def share_gradients(self, context_id: int) -> Traffic:
        """Replaces this LSTM's gradients with the sums over all copies, after the backward pass."""
        self._traffic.book("model")
        if self._gradient_sum is None:
            return self._traffic
        gradients = autograd.get_gradients(context_id)
        mine = [gradients[parameter] for parameter in self._lstm.parameters()]
        summed = self._gradient_sum.rpc_sync().add(self._number, mine)
        for gradient, total in zip(mine, summed, strict=True):
            gradient.copy_(total)  # in place: the optimizer reads the context's tensors
        self._traffic.book("lstm")
        return self._traffic

    def held_out_loss(self) -> tuple[float, int]:
        """Reads its held-out columns; returns the summed loss and the number of words."""
        self._traffic.book("control")
        total, words, hidden = 0.0, 0, None
        with torch.no_grad():
            for row in range(0, len(self._held_out) - 1, self._window):
                loss, hidden = self._read(self._held_out, row, hidden)
                read = min(self._window, len(self._held_out) - 1 - row) * self._held_out.shape[1]
                total, words = total + loss.item() * read, words + read
        self._traffic.book("evaluation")
        return total, words

    def state(self) -> dict[str, Any]:
        """Returns the state of the LSTM and its hidden state after the last window."""
        return {"lstm": self._lstm.state_dict(), "hidden": self._hidden}

    def load(self, state: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._lstm.load_state_dict(state["lstm"])
        self._hidden = state["hidden"]

    def _read(
        self, text: Tensor, row: int, hidden: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        targets = text[row + 1 : row + 1 + self._window]
        embeddings = self._embedding.forward(text[row : row + len(targets)])
        outputs, hidden = self._lstm(embeddings, hidden)
        if self._do_logits_travel:
            return mean_loss(self._decoder.forward(outputs), targets), hidden
        return self._decoder.forward(outputs, targets), hidden


def prepare_worker(seed: int, threads: int) -> None:
    """Sets the random seed and the number of threads of the worker that runs this."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)


def set_training(module_rref: rpc.RRef[nn.Module], is_training: bool) -> None:
    """Switches a module between training and evaluation; runs on the module's owner."""
    module_rref.local_value().train(is_training)
