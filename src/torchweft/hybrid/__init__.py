"""Models with sparse tables on servers, and a dense part under ``DistributedDataParallel``."""

from torchweft.embedding.recovery import recover
from torchweft.extending import find_devices as gather_facts
from torchweft.hybrid.clipping import measure
from torchweft.hybrid.model import HybridModel
from torchweft.hybrid.optimizer import HybridOptimizer
from torchweft.hybrid.passes import BatchStream
from torchweft.hybrid.plan import Dense, HybridPlan, PlacementError, TrainersDiffer
from torchweft.hybrid.process_group import Choice, choose_backend, init_process_group
from torchweft.hybrid.remote import RemoteHybridModel
from torchweft.hybrid.trainers import begun_for
from torchweft.reports import Devices as Facts

CALLABLES = (begun_for, measure)
"""The functions that a strict worker names in ``RpcBackendOptions(callables=...)``, beside those of
``torchweft.embedding``, so that trainers of hybrid models can clip gradients of rows there, and
ask a trainer that is late where it is."""

__all__ = [
    "CALLABLES",
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
