"""The language model of ``examples/``: against one process, and its traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data import Corpus, load_corpus
from report import activation_bytes
from settings import Settings
from synchronous import SynchronousTraining
from torch import nn

import torchweft

EXAMPLE = Path(__file__).parents[4] / "examples" / "language_model"
SMALL = Settings(batch=3, window=4, embedding=6, hidden=5, dropout=0.0, learning_rate=0.05)
SERVER, TRAINERS = "server", ["trainer0", "trainer1"]

# The tests share workers, which connect to one another on first use.
pytestmark = pytest.mark.keeps("threads", "descriptors", "processes", "shared memory")


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    with torchweft.cluster(names=[SERVER, *TRAINERS]):
        yield


def made_up_corpus() -> Corpus:
    words = [str(number) for number in range(11)]
    tokens = torch.randint(11, (25, 6), generator=torch.Generator().manual_seed(1))
    return Corpus("made up", words, tokens, tokens[:9])


@pytest.mark.parametrize("trainers", [TRAINERS[:1], TRAINERS], ids=["one", "two"])
def test_trainers_equal_one_process_with_all_their_batches(
    workers: None, trainers: list[str]
) -> None:
    corpus = made_up_corpus()
    training = SynchronousTraining(SERVER, trainers, corpus, SMALL, dtype=torch.float64)
    single = SingleProcess(corpus, training.state())
    steps = 20
    for step in range(steps):
        row = training.rows[step % len(training.rows)]
        report = training.step(row)
        loss = single.step(row)
        assert sum(report.losses) / len(trainers) == pytest.approx(loss, abs=1e-12)
    state = training.state()
    for name, module in single.modules.items():
        for part in [state[name]] if name != "lstm" else [t["lstm"] for t in state["trainers"]]:
            for key, expected in module.state_dict().items():
                torch.testing.assert_close(part[key], expected, atol=1e-12, rtol=0)
    first, *others = (trainer["lstm"] for trainer in state["trainers"])
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


def test_a_saved_model_is_the_same_on_other_workers(workers: None) -> None:
    corpus = made_up_corpus()
    training = SynchronousTraining(SERVER, TRAINERS, corpus, SMALL)
    for row in training.rows[:3]:
        training.step(row)
    other = SynchronousTraining(SERVER, TRAINERS[::-1], corpus, replace(SMALL, seed=7))
    assert other.held_out_perplexity() != training.held_out_perplexity()
    other.load(training.state())
    assert other.held_out_perplexity() == training.held_out_perplexity()
    row = training.rows[3]
    assert other.step(row).losses == training.step(row).losses  # the LSTM states are restored too


def test_what_the_model_moves_is_as_small_as_promised(workers: None) -> None:
    def measure(settings: Settings) -> float:
        training = SynchronousTraining(SERVER, TRAINERS, corpus, settings)
        reports = [training.step(row) for row in training.rows[:4]]
        before, after = (report.traffic[0].by_purpose["model"] for report in reports[::3])
        return (after - before) / 3

    settings = Settings()
    corpus = load_corpus(
        None, trainers=2, batch=settings.batch, window=settings.window, vocabulary_limit=4000
    )
    width, vocabulary = settings.embedding + settings.hidden, len(corpus.words)
    with_loss_on_server = activation_bytes(settings.batch, settings.window, width)
    with_logits = activation_bytes(settings.batch, settings.window, width + vocabulary)
    assert with_loss_on_server <= measure(settings) <= 1.05 * with_loss_on_server
    travelling = replace(settings, logits_travel=True)
    assert with_logits <= measure(travelling) <= 1.05 * with_logits


class SingleProcess:
    """The same model in plain PyTorch, from the same parameters, with all columns in one batch."""

    def __init__(self, corpus: Corpus, state: dict[str, Any]) -> None:
        vocabulary = len(corpus.words)
        options = {"dtype": torch.float64}
        self.embedding = nn.ModuleDict(
            {"table": nn.Embedding(vocabulary, SMALL.embedding, **options)}
        )
        self.decoder = nn.ModuleDict({"linear": nn.Linear(SMALL.hidden, vocabulary, **options)})
        self.lstm = nn.LSTM(SMALL.embedding, SMALL.hidden, **options)
        self.modules = {"embedding": self.embedding, "decoder": self.decoder, "lstm": self.lstm}
        self.embedding.load_state_dict(state["embedding"])
        self.decoder.load_state_dict(state["decoder"])
        self.lstm.load_state_dict(state["trainers"][0]["lstm"])
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=SMALL.learning_rate)
        self.text = corpus.training
        self.hidden: tuple[torch.Tensor, torch.Tensor] | None = None

    def step(self, row: int) -> float:
        inputs, targets = (self.text[at : at + SMALL.window] for at in (row, row + 1))
        outputs, hidden = self.lstm(self.embedding["table"](inputs), self.hidden if row else None)
        self.hidden = (hidden[0].detach(), hidden[1].detach())
        logits = self.decoder["linear"](outputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
