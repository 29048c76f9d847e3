"""Cuts a model into stages: measures its layers, and plans which form a stage on how many workers.

    measured = profile(model, example)                       # an nn.Sequential and a micro-batch
    made = plan(measured, Cluster(4, bandwidth=1e9, memory_bytes=8 * 2**30), n_microbatches=16)
    print(made)                                              # for instance 3-1, with its costs

``profiler`` alone knows torch. The rest is pure: ``costs`` has the input, and the cost model with
its source and its approximations; ``search`` the dynamic programme; ``plans`` the result. A plan
can also be made by hand (``Plan.manual``), and its cuts by a single number for each layer
(``balance``).
"""

from torchweft.pipeline.errors import DoesNotFit, PartitionError
from torchweft.pipeline.partition.costs import Cluster, LayerProfile, Profile, StageCost
from torchweft.pipeline.partition.plans import Plan, StagePlan
from torchweft.pipeline.partition.profiler import profile
from torchweft.pipeline.partition.search import balance, plan

__all__ = [
    "profile",
    "Profile",
    "LayerProfile",
    "Cluster",
    "plan",
    "balance",
    "Plan",
    "StagePlan",
    "StageCost",
    "PartitionError",
    "DoesNotFit",
]
