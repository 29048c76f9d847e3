"""Remote execution: calls to other workers, and references to values that live there.

The names and their meaning are those of ``torch.distributed.rpc``.
"""

from weft.ids import WorkerInfo
from weft.rpc import functions
from weft.rpc.calls import remote, rpc_async, rpc_sync
from weft.rpc.collective import all_gather, barrier
from weft.rpc.current_call import detached, is_cancelled, remaining_time
from weft.rpc.functions import async_execution
from weft.rpc.futures import Future
from weft.rpc.handles import UNSET_RPC_TIMEOUT, RRef
from weft.rpc.health import WorkerHealth, WorkerState, health, on_worker_lost
from weft.rpc.joining import (
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    shutdown,
    traffic,
)
from weft.rpc.options import RpcBackendOptions

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "Future",
    "RRef",
    "RpcBackendOptions",
    "WorkerHealth",
    "WorkerInfo",
    "WorkerState",
    "all_gather",
    "async_execution",
    "barrier",
    "detached",
    "functions",
    "get_worker_info",
    "get_worker_infos",
    "health",
    "init_rpc",
    "is_available",
    "is_cancelled",
    "remaining_time",
    "remote",
    "on_worker_lost",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "traffic",
]
