"""Measures how well clicks are predicted, by a model and without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from clicks import ITEMS, USERS, Impressions
from torch import Tensor, nn

PRIOR = 20.0
"""Impressions with the mean rate that are added to each id's own, so that rare ids are near it."""


class Quality(NamedTuple):
    """How well clicks were predicted.

    Attributes:
        auc: The probability that a click has a higher score than an impression without one.
        log_loss: The mean negative logarithm of the predicted probability.
    """

    auc: float
    log_loss: float


def quality_of(logits: Tensor, clicked: Tensor) -> Quality:
    """Returns the quality of predicted log-odds ``(n,)`` for clicks ``(n,)``."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits.double(), clicked.double())
    return Quality(auc(logits, clicked), loss.item())


def auc(scores: Tensor, clicked: Tensor) -> float:
    """Returns the area under the ROC curve; equal scores count half."""
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[places]
    positives = clicked.sum().double()
    negatives = len(clicked) - positives
    above = ranks[clicked > 0].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


class ClickRates:
    """The baseline: the click rates of users and items, as if these were independent."""

    def __init__(self) -> None:
        self._shown = {"user": torch.zeros(USERS), "item": torch.zeros(ITEMS)}
        self._clicked = {name: torch.zeros_like(shown) for name, shown in self._shown.items()}

    def count(self, found: Iterable[Impressions]) -> None:
        """Adds impressions that are trained on."""
        for impressions in found:
            for name, shown in self._shown.items():
                ids = impressions.ids[name]
                assert isinstance(ids, Tensor)
                shown.index_add_(0, ids, torch.ones(len(ids)))
                self._clicked[name].index_add_(0, ids, impressions.clicked)

    @property
    def rate(self) -> float:
        """The share of all impressions with a click."""
        return float(self._clicked["user"].sum() / self._shown["user"].sum())

    def logits(self, impressions: Impressions) -> Tensor:
        """Returns predicted log-odds ``(n,)``."""
        usual = torch.logit(torch.tensor(self.rate))
        total = usual.expand(len(impressions.clicked))
        for name, shown in self._shown.items():
            rates = (self._clicked[name] + PRIOR * self.rate) / (shown + PRIOR)
            ids = impressions.ids[name]
            assert isinstance(ids, Tensor)
            total = total + torch.logit(rates[ids]) - usual
        return total
