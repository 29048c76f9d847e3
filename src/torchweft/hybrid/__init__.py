"""Models with sparse tables on servers, and a dense part under ``DistributedDataParallel``."""

from torchweft.embedding.recovery import recover
from torchweft.hybrid.backends import Choice, Facts, choose_backend, gather_facts
from torchweft.hybrid.errors import PlacementError, TrainersDiffer
from torchweft.hybrid.model import HybridModel
from torchweft.hybrid.optimizer import HybridOptimizer
from torchweft.hybrid.passes import BatchStream
from torchweft.hybrid.plan import Dense, HybridPlan
from torchweft.hybrid.remote import RemoteHybridModel
from torchweft.hybrid.starting import init_process_group

__all__ = [
    "BatchStream",
    "Choice",
    "Dense",
    "Facts",
    "HybridModel",
    "HybridOptimizer",
    "HybridPlan",
    "PlacementError",
    "RemoteHybridModel",
    "TrainersDiffer",
    "choose_backend",
    "gather_facts",
    "init_process_group",
    "recover",
]
