"""Handwritten digits, for training and for a test, in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TESTED = 360
"""How many of the 1,797 images are for the test."""


@dataclass(frozen=True)
class Images:
    """Images, shape ``(images, 1, 8, 8)`` with values from 0 to 1, and their digits."""

    pixels: Tensor
    digits: Tensor

    def __len__(self) -> int:
        return len(self.digits)


def load_images() -> tuple[Images, Images]:
    """Returns scikit-learn's images to train on, and those for the test.

    Raises:
        ImportError: scikit-learn is missing.
    """
    from sklearn.datasets import load_digits  # takes a second

    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(found.target)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    tested, trained = order[:TESTED], order[TESTED:]
    return Images(pixels[trained], digits[trained]), Images(pixels[tested], digits[tested])


def batches(images: Images, size: int, generator: torch.Generator) -> Iterator[Images]:
    """Yields all images once in a new order, except those left over from whole batches."""
    for chosen in torch.randperm(len(images), generator=generator).split(size):
        if len(chosen) == size:
            yield Images(images.pixels[chosen], images.digits[chosen])


def padded(pixels: Tensor, count: int) -> Tensor:
    """Returns the images with some repeated at the end, so that ``count`` divides their number."""
    missing = -len(pixels) % count
    rows = torch.arange(len(pixels) + missing) % len(pixels)
    return pixels[rows] if missing else pixels
