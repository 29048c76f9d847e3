"""The language model of ``examples/`` with all its parts on a GPU, beside one process on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data import Corpus
from settings import Settings
from synchronous import SynchronousTraining
from torch import Tensor, nn

from tests.gpu.device import DEVICE
from torchweft.launch import Cluster

SMALL = Settings(batch=6, window=8, embedding=24, hidden=32, dropout=0.0, learning_rate=2.0)
SERVER, TRAINERS = "worker0", ["worker1", "worker2"]
STEPS = 20
TOLERANCE = 1e-5


def made_up_corpus() -> Corpus:
    """Returns a text in which a word's successor is mostly the same."""
    words = [str(number) for number in range(50)]
    tokens = (torch.arange(65).square().unsqueeze(1) + 5 * torch.arange(12)) % 50
    return Corpus("made up", words, tokens, tokens[:9])


@pytest.mark.parametrize("trainers", [TRAINERS[:1], TRAINERS], ids=["two workers", "three workers"])
def test_trainers_equal_one_process_with_all_their_batches(
    group: Cluster, trainers: list[str]
) -> None:
    corpus = made_up_corpus()
    training = SynchronousTraining(
        SERVER, trainers, corpus, SMALL, optimizer_type=torch.optim.SGD, device=str(DEVICE)
    )
    single = SingleProcess(corpus, training.state())
    losses = []
    for step in range(STEPS):
        row = training.rows[step % len(training.rows)]
        report = training.step(row)
        losses.append(single.step(row))
        mean = sum(report.losses) / len(trainers)
        assert mean == pytest.approx(losses[-1], rel=TOLERANCE), f"step {step}"
    assert losses[-1] < losses[0] - 0.1, losses
    state = training.state()
    for name, module in single.modules.items():
        for part in [state[name]] if name != "lstm" else [t["lstm"] for t in state["trainers"]]:
            for key, expected in module.state_dict().items():
                assert part[key].device == expected.device == DEVICE
                torch.testing.assert_close(part[key], expected, atol=TOLERANCE, rtol=TOLERANCE)
    first, *others = (trainer["lstm"] for trainer in state["trainers"])
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


class SingleProcess:
    """The same model in plain PyTorch, from the same parameters, with all columns in one batch."""

    def __init__(self, corpus: Corpus, state: dict[str, Any]) -> None:
        vocabulary = len(corpus.words)
        embedding = nn.ModuleDict({"table": nn.Embedding(vocabulary, SMALL.embedding)})
        decoder = nn.ModuleDict({"linear": nn.Linear(SMALL.hidden, vocabulary)})
        lstm = nn.LSTM(SMALL.embedding, SMALL.hidden)
        self.modules = {"embedding": embedding, "decoder": decoder, "lstm": lstm}
        for name, module in self.modules.items():
            module.to(DEVICE)
            module.load_state_dict(state["trainers"][0]["lstm"] if name == "lstm" else state[name])
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=SMALL.learning_rate)
        self._text = corpus.training.to(DEVICE)
        self._hidden: tuple[Tensor, Tensor] | None = None

    def step(self, row: int) -> float:
        embedding, decoder, lstm = self.modules.values()
        inputs, targets = (self._text[at : at + SMALL.window] for at in (row, row + 1))
        outputs, hidden = lstm(embedding["table"](inputs), self._hidden if row else None)
        self._hidden = (hidden[0].detach(), hidden[1].detach())
        logits = decoder["linear"](outputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()
