"""A model that many clients ask, and how a client asks it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft import rpc
from torchweft.rpc import functions

WORDS, WIDTH, CLASSES, LONGEST = 1000, 128, 10, 40


class Classifier(nn.Module):
    """Classifies texts by the mean of their words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, CLASSES)
        )

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Takes words (batch, longest) and lengths (batch,); returns chances (batch, CLASSES)."""
        is_word = torch.arange(words.shape[1]) < lengths[:, None]
        summed = (self.embedding(words) * is_word[..., None]).sum(dim=1)
        return self.head(summed / lengths[:, None]).softmax(dim=1)


class Server:
    """Serves the model on one worker."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = Classifier().eval()

    @functions.batched(largest=64, longest_wait=0.002, limit=1024, pad=0)
    def classify(self, words: Tensor, length: list[int]) -> Tensor:
        """Takes the texts of a batch, filled up with zeros; a client passes one text."""
        with torch.no_grad():
            return self._model(words, torch.tensor(length))

    def classify_alone(self, words: Tensor, length: int) -> Tensor:
        """Does the same for one client, to compare."""
        with torch.no_grad():
            return self._model(words[None], torch.tensor([length]))[0]


class Asked(NamedTuple):
    """The results of one client.

    Attributes:
        latencies_s: Of each request.
        difference: The largest, in any chance, to a model of the client's own.
    """

    latencies_s: list[float]
    difference: float


def ask(server: rpc.RRef[Server], way: str, client: int, threads: int, requests: int) -> Asked:
    """Asks by several threads at once; each waits for an answer before its next request."""
    torch.set_num_threads(1)
    own = Classifier().eval()

    def run(thread: int) -> Asked:
        generator = torch.Generator().manual_seed(1000 * client + thread)
        latencies_s, difference = [], 0.0
        for number in range(requests):
            length = int(torch.randint(1, LONGEST + 1, (), generator=generator))
            words = torch.randint(WORDS, (length,), generator=generator)
            began_s = time.perf_counter()
            chances = getattr(server.rpc_sync(), way)(words, length)
            latencies_s.append(time.perf_counter() - began_s)
            if number == 0:
                with torch.no_grad():
                    expected = own(words[None], torch.tensor([length]))[0]
                difference = float((chances - expected).abs().max())
        return Asked(latencies_s, difference)

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(run, range(threads)))
    latencies = [latency for each in found for latency in each.latencies_s]
    return Asked(latencies, max(each.difference for each in found))
