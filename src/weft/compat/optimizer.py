"""The names of ``torch.distributed.optim.optimizer``, meaning Weft."""

from weft.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
