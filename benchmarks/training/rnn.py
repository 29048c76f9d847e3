"""An RNN whose embedding table and decoder live on a parameter server, the LSTM on the trainer.

Sizes and dropout are those of PyTorch's tutorial on the RPC framework.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.frame.api import current
from benchmarks.training.references import references_to_parameters, remote_method, seed_all

api = current()

BATCH, TOKENS, EMBEDDING, HIDDEN, INDICES, LAYERS, DROPOUT = 5, 10, 2, 3, 3, 4, 0.5
State = tuple[Tensor, Tensor]


class EmbeddingTable(nn.Module):
    """Lives on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(DROPOUT)
        self.encoder = nn.Embedding(TOKENS, EMBEDDING)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.drop(self.encoder(tokens))
        return embedded


class Decoder(nn.Module):
    """Lives on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(DROPOUT)
        self.decoder = nn.Linear(HIDDEN, TOKENS)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, output: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.drop(output))
        return decoded


class RnnModel(nn.Module):
    """The LSTM, and references to the embedding table and the decoder."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self.embedding = api.rpc.remote(server, EmbeddingTable)
        self.rnn = nn.LSTM(EMBEDDING, HIDDEN, LAYERS, dropout=DROPOUT)
        self.parameter_references = [
            # Wait for the table, so that the decoder draws its random numbers after it.
            *remote_method(references_to_parameters, self.embedding),
            *references_to_parameters(self.rnn),
        ]
        self.decoder = api.rpc.remote(server, Decoder)
        self.parameter_references += remote_method(references_to_parameters, self.decoder)

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        embedded = remote_method(EmbeddingTable.forward, self.embedding, tokens)
        output, state = self.rnn(embedded, state)
        return remote_method(Decoder.forward, self.decoder, output), state


class Trainer:
    """Trains the model on the first worker, with the second as its server."""

    def __init__(self) -> None:
        seed_all()
        self._model = RnnModel(api.peers[0])
        self._optimizer = api.optim.DistributedOptimizer(
            torch.optim.SGD, self._model.parameter_references, lr=0.05
        )
        self._criterion = nn.CrossEntropyLoss()
        self._state = (torch.randn(LAYERS, INDICES, HIDDEN), torch.randn(LAYERS, INDICES, HIDDEN))

    def step(self) -> float:
        """Trains on one batch; returns the loss."""
        tokens = torch.randint(TOKENS, (BATCH, INDICES))
        target = torch.randint(INDICES, (BATCH, TOKENS))
        with api.autograd.context() as context_id:
            self._state = (self._state[0].detach(), self._state[1].detach())
            output, self._state = self._model(tokens, self._state)
            loss = self._criterion(output, target)
            api.autograd.backward(context_id, [loss])
            self._optimizer.step(context_id)
        return float(loss)

    def train(self, steps: int) -> list[float]:
        """Trains on a batch for each step; returns the losses."""
        return [self.step() for _ in range(steps)]
