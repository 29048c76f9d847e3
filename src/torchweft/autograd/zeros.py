"""Zeros in place of missing gradients, as ``torch.distributed.autograd`` sends them.

There, each message that a backward pass reaches is answered with a gradient for each tensor, with
zeros for missing gradients. So the remote part runs where one process would run nothing, and its
leaves get zero gradients. Programs written for ``torch.distributed.autograd`` may rely on that.
"""

from __future__ import annotations

import torch

from torchweft.autograd.contexts import TensorMeta
from torchweft.autograd.gradients import UNDEFINED, Gradient

_is_enabled = False


def enable_zeros(enabled: bool = True) -> None:
    """Sets whether passes send zeros from now on."""
    global _is_enabled
    _is_enabled = enabled


def with_zeros(gradients: list[Gradient], metas: tuple[TensorMeta, ...]) -> list[Gradient]:
    """Returns the gradients of a message; if enabled, with zeros for missing gradients."""
    if not _is_enabled:
        return gradients
    return [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        if gradient is None or gradient is UNDEFINED
        else gradient
        for gradient, meta in zip(gradients, metas, strict=True)
    ]
