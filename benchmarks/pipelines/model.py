"""The stages, the batch, the loss and the optimizer, which are the same on all sides."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.pipelines.cases import MICROBATCHES, Case

LEARNING_RATE = 0.1
loss = nn.functional.mse_loss


def stage(case: Case, number: int) -> nn.Module:
    """Returns a stage; its weights depend on its number only."""
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(case.width, case.width), nn.Tanh())


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Returns the samples of all micro-batches, and their targets."""
    torch.manual_seed(100)
    inputs, target = torch.randn(2, MICROBATCHES * case.rows, case.width)
    return inputs, target
