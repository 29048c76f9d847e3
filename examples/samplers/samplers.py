"""Samplers of a small language model, whose weights come by version while they generate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft.rpc import RRef
from torchweft.weights import Publisher, Subscriber

LETTERS, LENGTH, HIDDEN = 12, 16, 48


class Model(nn.Module):
    """A recurrent model of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, HIDDEN)
        self.cell = nn.GRUCell(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, LETTERS)

    def step(self, letters: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of the next letters, (batch, LETTERS), and the new state."""
        hidden = self.cell(self.embedding(letters), hidden)
        return self.head(hidden), hidden

    def log_chances(self, texts: Tensor) -> Tensor:
        """Returns log-chances of all letters but the first, (batch, LENGTH - 1)."""
        hidden = torch.zeros(len(texts), HIDDEN)
        found = []
        for place in range(LENGTH - 1):
            logits, hidden = self.step(texts[:, place], hidden)
            found.append(logits.log_softmax(1).gather(1, texts[:, place + 1, None]).squeeze(1))
        return torch.stack(found, dim=1)


def reward_of(texts: Tensor) -> Tensor:
    """Returns the share of letters that follow their predecessor in the alphabet, (batch,)."""
    return (texts[:, 1:] == (texts[:, :-1] + 1) % LETTERS).float().mean(dim=1)


class Samples(NamedTuple):
    """Texts of one batch.

    Attributes:
        texts: Letters, (batch, LENGTH).
        log_chances: Those with which they were drawn, (batch, LENGTH - 1).
        version: That of the weights of the whole batch.
        update_s: Seconds of the change of weights before the batch.
        seconds: Seconds of the batch.
    """

    texts: Tensor
    log_chances: Tensor
    version: int
    update_s: float
    seconds: float


class Sampler:
    """Generates texts, each batch with the newest weights that have arrived.

    Args:
        publisher: The learner's weights.
        seed: Seed of the texts.
    """

    def __init__(self, publisher: RRef[Publisher], seed: int) -> None:
        torch.set_num_threads(1)
        self._model = Model()
        self._subscriber = Subscriber(publisher, self._model)
        self._generator = torch.Generator().manual_seed(seed)

    def samples(self, count: int, pause_s: float) -> Iterator[Samples]:
        """Yields batches of texts; waits for a while after each, as a slower sampler would."""
        self._subscriber.update(timeout=30.0)
        while True:
            began_s = time.perf_counter()
            version = self._subscriber.update()
            updated_s = time.perf_counter()
            texts, log_chances = self._generate(count)
            ended_s = time.perf_counter()
            yield Samples(texts, log_chances, version, updated_s - began_s, ended_s - updated_s)
            time.sleep(pause_s)

    @torch.no_grad()
    def _generate(self, count: int) -> tuple[Tensor, Tensor]:
        letters = torch.randint(LETTERS, (count,), generator=self._generator)
        hidden, texts, logs = torch.zeros(count, HIDDEN), [letters], []
        for _ in range(LENGTH - 1):
            logits, hidden = self._model.step(letters, hidden)
            chances = logits.log_softmax(1)
            letters = torch.multinomial(chances.exp(), 1, generator=self._generator).squeeze(1)
            texts.append(letters)
            logs.append(chances.gather(1, letters[:, None]).squeeze(1))
        return torch.stack(texts, dim=1), torch.stack(logs, dim=1)

    def close(self) -> None:
        """Stops following the learner."""
        self._subscriber.close()
