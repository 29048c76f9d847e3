"""Remote execution: calls to other workers, and references to values that live there.

The names and their meaning are those of ``torch.distributed.rpc``.
"""

from typing import Any

from torchweft.ids import WorkerInfo
from torchweft.rpc import absent, constants, functions
from torchweft.rpc.api import remote, rpc_async, rpc_sync
from torchweft.rpc.collective import all_gather, barrier
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import detached, is_cancelled, remaining_time
from torchweft.rpc.fan_out import as_completed, rpc_all
from torchweft.rpc.functions import async_execution
from torchweft.rpc.futures import Future
from torchweft.rpc.health import WorkerHealth, WorkerState, health, on_worker_lost
from torchweft.rpc.joining import (
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    shutdown,
    traffic,
)
from torchweft.rpc.options import RpcBackendOptions
from torchweft.rpc.rref import RRef
from torchweft.rpc.stack_report import CallStatus, ThreadStack, WorkerStacks, stacks
from torchweft.rpc.targets import OnValue, OnWorker, on
from torchweft.rpc.tensorpipe import BackendType, TensorPipeRpcBackendOptions
from torchweft.serialize.callables import expose, register

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "BackendType",
    "CallStatus",
    "Future",
    "OnValue",
    "OnWorker",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "ThreadStack",
    "WorkerHealth",
    "WorkerInfo",
    "WorkerStacks",
    "WorkerState",
    "all_gather",
    "as_completed",
    "async_execution",
    "barrier",
    "constants",
    "detached",
    "expose",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "health",
    "init_rpc",
    "is_available",
    "is_cancelled",
    "remaining_time",
    "remote",
    "on",
    "on_worker_lost",
    "register",
    "rpc_all",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "stacks",
    "traffic",
]

PyRRef = RRef
"""The class that PyTorch's ``remote`` returns; Weft has one class of references."""


def __getattr__(name: str) -> Any:
    raise AttributeError(absent.explain(name, __all__))
