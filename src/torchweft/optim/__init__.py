"""Stepping parameters where they live: ``DistributedOptimizer``, and clipping by global norm."""

from torchweft.optim.clipping import clip_grad_norm_
from torchweft.optim.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]
