"""Remote execution: calls to other workers, and references to values that live there.

The names and their meaning are those of ``torch.distributed.rpc``.
"""

import importlib
from typing import Any

from torchweft.arguments import did_you_mean
from torchweft.engine.codec.registry import expose, register
from torchweft.ids import WorkerInfo
from torchweft.rpc import constants, functions
from torchweft.rpc.api import (
    Actors,
    OnValue,
    OnWorker,
    actors,
    as_completed,
    on,
    remote,
    rpc_all,
    rpc_async,
    rpc_sync,
)
from torchweft.rpc.collective import all_gather, barrier
from torchweft.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.rpc.current_call import detached, is_cancelled, remaining_time
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
from torchweft.rpc.observed import CallStatus, ThreadStack, WorkerStacks, stacks
from torchweft.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from torchweft.rpc.rref import RRef
from torchweft.rpc.streams import Merged, Stream, merged, stream

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "Actors",
    "BackendType",
    "CallStatus",
    "Future",
    "Merged",
    "OnValue",
    "OnWorker",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "Stream",
    "TensorPipeRpcBackendOptions",
    "ThreadStack",
    "WorkerHealth",
    "WorkerInfo",
    "WorkerStacks",
    "WorkerState",
    "actors",
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
    "merged",
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
    "stream",
    "traffic",
]

PyRRef = RRef
"""The class that PyTorch's ``remote`` returns; Weft has one class of references."""


def __getattr__(name: str) -> Any:
    text = f"module 'torchweft.rpc' has no attribute {name!r}"
    if name in functions.__all__:
        text += f"; use torchweft.rpc.functions.{name}"
    elif not name.startswith("_") and hasattr(importlib.import_module(_DROP_IN), name):
        text += (
            ", which torch.distributed.rpc has; a program that needs it runs unchanged under "
            "python -m torchweft.compat"
        )
    else:
        text += did_you_mean(name, __all__)
    raise AttributeError(text)


_DROP_IN = "torchweft.compat.rpc"
"""Has all names of ``torch.distributed.rpc``; of a layer above, and imported where it is needed."""
