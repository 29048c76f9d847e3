"""Handwritten digits by class: each task is to distinguish three digits, from one image of each.

Some digits are held out: no training task contains them. A network soon memorizes the images of so
few digits. Therefore training tasks rotate and mirror each digit, which makes eight classes of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from maml import Task
from torch import Tensor, nn

HELD_OUT = (6, 7, 8, 9)
TRAINED = (0, 1, 2, 3, 4, 5)
SIDE = 8
QUERIES = 5
CHANNELS = 16


@dataclass(frozen=True)
class Digits:
    """Tasks of ``ways`` digits out of ``classes``; each task assigns new labels.

    Attributes:
        classes: The digits that tasks draw from.
        turned: Whether each task shows each digit in one of eight rotations and reflections.
        ways: Digits in a task.
        shots: Images of each digit to adapt to.
        inner_rate: Learning rate of the inner steps.
        inner_steps: Number of inner steps in training.
    """

    score_name: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    classes: tuple[int, ...] = TRAINED
    turned: bool = True
    ways: int = 3
    shots: int = 1
    inner_rate: float = 0.2
    inner_steps: int = 2

    def make_network(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(CHANNELS * (SIDE // 4) ** 2, self.ways),
        )

    def make_task(self, seed: int) -> Task:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self.classes), generator=generator)[: self.ways]
        images = [self._draw(self.classes[place], generator) for place in chosen.tolist()]
        support, query = torch.stack(images).split([self.shots, QUERIES], dim=1)
        labels = torch.arange(self.ways)
        return Task(
            support.flatten(0, 1),
            labels.repeat_interleave(self.shots),
            query.flatten(0, 1),
            labels.repeat_interleave(QUERIES),
        )

    def _draw(self, digit: int, generator: torch.Generator) -> Tensor:
        """Returns images of one digit, shape ``(shots + QUERIES, 1, SIDE, SIDE)``."""
        images = images_by_digit()[digit]
        order = torch.randperm(len(images), generator=generator)[: self.shots + QUERIES]
        drawn = images[order]
        if not self.turned:
            return drawn
        way = int(torch.randint(8, (), generator=generator))
        turned = torch.rot90(drawn, way % 4, dims=(2, 3))
        return turned.mT if way >= 4 else turned

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def score(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the share of images that were recognised."""
        return (output.argmax(dim=-1) == target).float().mean()


@functools.cache
def images_by_digit() -> list[Tensor]:
    """Returns scikit-learn's images of each digit, shape ``(images, 1, SIDE, SIDE)``, 0 to 1.

    Raises:
        ImportError: scikit-learn is missing.
    """
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return [images[labels == digit] for digit in range(10)]
