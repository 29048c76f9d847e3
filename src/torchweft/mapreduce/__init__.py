"""Maps one function over the parts of its arguments, on several workers, in one autograd graph.

The names and their meaning are those of ``torchopt.distributed``. Two names are added:
``broadcast`` marks arguments that are not cut, and ``progress`` shows which parts run where.
"""

import torch.distributed as dist

from torchweft import rpc
from torchweft.mapreduce import api, autograd, world
from torchweft.mapreduce.api import (
    TensorDimensionPartitioner,
    batch_partitioner,
    broadcast,
    dim_partitioner,
    exclusive_batch_partitioner,
    mean_reducer,
    parallelize,
    parallelize_async,
    parallelize_sync,
    remote_async_call,
    remote_sync_call,
    sum_reducer,
)
from torchweft.mapreduce.autograd import is_available
from torchweft.mapreduce.observers import progress
from torchweft.mapreduce.trees import module_clone
from torchweft.mapreduce.world import (
    auto_init_rpc,
    barrier,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_worker_id,
    get_world_info,
    get_world_rank,
    get_world_size,
    not_on_rank,
    on_rank,
    rank_all,
    rank_non_zero_only,
    rank_zero_only,
)

__all__ = [
    "TensorDimensionPartitioner",
    "api",
    "auto_init_rpc",
    "autograd",
    "barrier",
    "batch_partitioner",
    "broadcast",
    "dim_partitioner",
    "dist",
    "exclusive_batch_partitioner",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_worker_id",
    "get_world_info",
    "get_world_rank",
    "get_world_size",
    "is_available",
    "mean_reducer",
    "module_clone",
    "not_on_rank",
    "on_rank",
    "parallelize",
    "parallelize_async",
    "parallelize_sync",
    "progress",
    "rank_all",
    "rank_non_zero_only",
    "rank_zero_only",
    "remote_async_call",
    "remote_sync_call",
    "rpc",
    "sum_reducer",
    "world",
]
