"""The world of a map: this process's place, rank-dependent functions, and starting all workers.

These are the names of ``torchopt.distributed.world``, and ``WorldInfo``.
"""

from torchweft.mapreduce.identity import (
    WorldInfo,
    default_worker_name_format,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_worker_id,
    get_world_info,
    get_world_rank,
    get_world_size,
)
from torchweft.mapreduce.selection import (
    not_on_rank,
    on_rank,
    rank_all,
    rank_non_zero_only,
    rank_zero_only,
)
from torchweft.mapreduce.starting import auto_init_rpc, barrier

__all__ = [
    "WorldInfo",
    "auto_init_rpc",
    "barrier",
    "default_worker_name_format",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_worker_id",
    "get_world_info",
    "get_world_rank",
    "get_world_size",
    "not_on_rank",
    "on_rank",
    "rank_all",
    "rank_non_zero_only",
    "rank_zero_only",
]
