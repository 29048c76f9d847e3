"""Stepping parameters where they live: ``DistributedOptimizer``, and clipping by global norm."""

from torchweft.optim.clipping import clip_grad_norm_
from torchweft.optim.distributed import DistributedOptimizer
from torchweft.optim.local import LocalOptimizer, Saved, step_lock, step_optimizer

__all__ = [
    "DistributedOptimizer",
    "LocalOptimizer",
    "Saved",
    "clip_grad_norm_",
    "step_lock",
    "step_optimizer",
]
