"""Tests the measure of quality of the embedding example."""

from __future__ import annotations

import math

import pytest
import torch
from quality import auc, quality_of


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(10, (40,), generator=generator).double()  # many are equal
    clicked = torch.randint(2, (40,), generator=generator).double()
    above = scores[clicked > 0][:, None] - scores[clicked == 0][None]
    expected = ((above > 0).double() + (above == 0).double() / 2).mean()
    assert auc(scores, clicked) == pytest.approx(float(expected))
    assert auc(torch.zeros(40), clicked) == pytest.approx(0.5)
    assert quality_of(torch.zeros(40), clicked).log_loss == pytest.approx(math.log(2))
