"""Zeros in place of missing gradients, as ``torch.distributed.autograd`` sends them.

A message that a backward pass reaches is answered there with a gradient for each of its tensors:
zeros where none has come. So the remote part runs where one process would have run nothing, and
its leaves get gradients of zeros. Programs that were written for it may count on that.
"""

from __future__ import annotations

import torch

from torchweft.autograd.contexts import TensorMeta
from torchweft.autograd.gradients import UNDEFINED, Gradient

_is_enabled = False


def enable_zeros(enabled: bool = True) -> None:
    """Has passes send zeros from now on, or not."""
    global _is_enabled
    _is_enabled = enabled


def with_zeros(gradients: list[Gradient], metas: tuple[TensorMeta, ...]) -> list[Gradient]:
    """Returns the gradients of a message, zeros in place of missing ones if that is on."""
    if not _is_enabled:
        return gradients
    return [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
        if gradient is None or gradient is UNDEFINED
        else gradient
        for gradient, meta in zip(gradients, metas, strict=True)
    ]
