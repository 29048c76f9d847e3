"""Trains a model whose two parts live on two workers, with plain remote calls.

    python examples/model_parallel/two_parts.py --split 16

A batch is split into micro-batches. The driver calls the parts for all of them without waiting, so
that the first part works on one while the second part works on the one before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import torchweft as weft
from torchweft import autograd, rpc
from torchweft.optim import DistributedOptimizer
from torchweft.progress import Display
from torchweft.rpc import RRef

CHANNELS, N_TESTED, RATE = 16, 360, 0.1


class Block(nn.Module):
    """A residual block; group normalization treats each image by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.GroupNorm(4, CHANNELS)

    def forward(self, images: Tensor) -> Tensor:
        return images + torch.relu(self.norm(self.conv(images)))


def make_first() -> nn.Module:
    """Returns the first part: from images, shape ``(batch, 1, 8, 8)``, to features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), Block(), Block())


def make_second() -> nn.Module:
    """Returns the second part: from features to scores, shape ``(batch, 10)``."""
    torch.manual_seed(1)
    last = nn.Linear(4 * CHANNELS, 10)
    return nn.Sequential(Block(), Block(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), last)


# What runs on the workers


def run_part(part: RRef, inputs: RRef) -> Tensor:
    """Runs a part where it lives; gets the inputs directly from the worker that made them."""
    result: Tensor = part.local_value()(inputs.to_here())
    return result


def parameters_of(part: RRef) -> list[RRef]:
    return [RRef(each) for each in part.local_value().parameters()]


# What the driver does


class TwoParts:
    """A model in two parts on two workers.

    Args:
        workers: The names of the workers.
        split: Images of a micro-batch.
    """

    def __init__(self, workers: list[str], split: int) -> None:
        makers: list[Callable[[], nn.Module]] = [make_first, make_second]
        self.split = split
        self.parts = [rpc.remote(name, make) for name, make in zip(workers, makers, strict=True)]
        self.parameters = [
            each
            for part in self.parts
            for each in rpc.rpc_sync(part.owner(), parameters_of, args=(part,))
        ]

    def __call__(self, images: Tensor) -> Tensor:
        first, second = self.parts
        scores = []
        for piece in images.split(self.split):
            features = rpc.remote(first.owner(), run_part, args=(first, RRef(piece)))
            scores.append(rpc.rpc_async(second.owner(), run_part, args=(second, features)))
        return torch.cat(torch.futures.wait_all(scores))


def train(model: TwoParts, n_epochs: int, batch: int) -> Iterator[float]:
    """Trains; yields the loss of each step."""
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters, lr=RATE)
    for images, labels in batches(n_epochs, batch):
        with autograd.context() as context:
            loss = nn.functional.cross_entropy(model(images), labels)
            autograd.backward(context, [loss])
            optimizer.step(context)
        yield loss.item()


def digits() -> tuple[Tensor, Tensor]:
    """Returns scikit-learn's images and their digits, in a random order."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.tensor(found.target)[order]


def batches(n_epochs: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the images in a new order for each epoch, except those left over."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_epochs):
        order = torch.randperm(len(images) - N_TESTED, generator=generator) + N_TESTED
        for part in order.split(size):
            if len(part) == size:
                yield images[part], labels[part]


def accuracy(model: Callable[[Tensor], Tensor]) -> float:
    images, labels = digits()
    with torch.no_grad():
        found = model(images[:N_TESTED]).argmax(dim=1)
    return (found == labels[:N_TESTED]).float().mean().item()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a model in two parts on two workers.")
    parser.add_argument("--split", type=int, default=16, help="images of a micro-batch")
    parser.add_argument("--batch", type=int, default=64, help="images of a step")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the images")
    parser.add_argument("--out", type=Path, help="folder for the figures (default: runs/TIME)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    folder = options.out or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    total = options.epochs * len(list(batches(1, options.batch)))
    losses = []
    with weft.cluster(workers=2) as cluster, Display(total, "step") as shown:
        for name in cluster.names:  # Two workers that compute with all cores hinder each other.
            rpc.rpc_sync(name, torch.set_num_threads, args=(1,))
        model = TwoParts(list(cluster.names), options.split)
        began = time.monotonic()
        for loss in train(model, options.epochs, options.batch):
            losses.append(loss)
            shown.step(loss=loss)
        seconds = time.monotonic() - began
        share = accuracy(model)
    figures = {"losses": losses, "accuracy": share, "seconds": seconds, "split": options.split}
    (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(
        f"{len(losses)} steps in {seconds:.1f} s; {100 * share:.1f} % of the test images recognised"
    )
    print(f"figures.json is in {folder}")


if __name__ == "__main__":
    main()
