"""Trains tables that are cut over two servers, and a layer that two trainers replicate by DDP.

    python examples/hybrid/tables.py --steps 200

``HybridModel`` places the parameters of an ordinary module in one call. The rows that a step needs
go to the trainers, and their gradients to the servers; DDP averages the others.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, distributed, nn

import torchweft as weft
from torchweft import rpc
from torchweft.embedding import Adagrad, RowWise
from torchweft.hybrid import HybridModel, init_process_group

TRAINERS, SERVERS = ["worker0", "worker1"], ["worker2", "worker3"]
WORDS, PLACES, DIMENSION, CLASSES = 100_000, 5_000, 16, 8
BATCH = 64


class Classifier(nn.Module):
    """Tells the class of some words at a place; knows nothing of servers and trainers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, DIMENSION, mode="mean", sparse=True)
        self.places = nn.Embedding(PLACES, DIMENSION, sparse=True)
        self.layer = nn.Linear(DIMENSION, CLASSES)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        """Returns the logits of the classes."""
        logits: Tensor = self.layer(self.words(words) + self.places(places))
        return logits


def draw_batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns words ``(64, 10)``, places and classes, ``(64,)``; all words are of the class."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    classes = torch.randint(CLASSES, (BATCH,), generator=generator)
    # Few words are frequent, as in a text.
    draws = torch.rand(BATCH, 10, generator=generator, dtype=torch.float64)
    words = ((WORDS // CLASSES) ** draws).long() - 1
    places = torch.randint(PLACES, (BATCH,), generator=generator)
    return words * CLASSES + classes.unsqueeze(1), places, classes


def train(rank: int, steps: int) -> tuple[str, list[float]]:
    """Runs on a trainer. Returns the plan, and the loss of each step."""
    init_process_group(TRAINERS)
    torch.manual_seed(0)
    words, places, _ = draw_batch(0, rank)
    model = HybridModel(
        Classifier(),
        SERVERS,
        batches=[(words, places)],
        places={"words": RowWise(*SERVERS)},
    )
    optimizer = model.optimizer(Adagrad(lr=0.5), lambda dense: torch.optim.Adam(dense, lr=0.01))
    losses = []
    for step in range(steps):
        words, places, classes = draw_batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words, places), classes)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    plan = str(model.plan)
    model.close()
    distributed.destroy_process_group()
    return plan, losses


def main() -> None:
    """Reads the command line, and has both trainers train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps is {steps}; it is at least 1")
    with weft.cluster(workers=4):
        calls = [
            rpc.rpc_async(name, train, args=(rank, steps), timeout=0)
            for rank, name in enumerate(TRAINERS)
        ]
        (plan, first), (_, second) = [call.wait() for call in calls]
    print(plan)
    for step in sorted({0, steps // 4, steps // 2, steps - 1}):
        print(f"step {step + 1}: loss {(first[step] + second[step]) / 2:.3f}")


if __name__ == "__main__":
    main()
