"""Remote execution: calls to other workers, and references to values that live there.

The names and their meaning are those of ``torch.distributed.rpc``.
"""

import importlib
import sys
from typing import Any

from torchweft.arguments import UNSET_RPC_TIMEOUT, did_you_mean
from torchweft.engine.codec.registry import expose, register
from torchweft.ids import WorkerInfo
from torchweft.notice import is_notice_given
from torchweft.rpc import functions
from torchweft.rpc import options as constants
from torchweft.rpc.api import (
    Actors,
    OnValue,
    OnWorker,
    RRef,
    actors,
    on,
    remote,
    rpc_all,
    rpc_async,
    rpc_sync,
)
from torchweft.rpc.calls import Future, OrderedFuture
from torchweft.rpc.collective import all_gather, barrier
from torchweft.rpc.functions import async_execution
from torchweft.rpc.joining import (
    caller,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    shutdown,
    traffic,
)
from torchweft.rpc.observed import (
    CallStatus,
    ThreadStack,
    WorkerHealth,
    WorkerStacks,
    WorkerState,
    health,
    on_unseen_error,
    on_worker_lost,
    stacks,
)
from torchweft.rpc.options import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions
from torchweft.rpc.serving import detached, is_cancelled, remaining_time
from torchweft.rpc.streams import Merged, Stream, merged, stream
from torchweft.rpc.waiting import AsCompleted, as_completed, wait

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "Actors",
    "AsCompleted",
    "BackendType",
    "CallStatus",
    "Future",
    "Merged",
    "OnValue",
    "OnWorker",
    "OrderedFuture",
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
    "caller",
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
    "is_notice_given",
    "merged",
    "remaining_time",
    "remote",
    "on",
    "on_unseen_error",
    "on_worker_lost",
    "register",
    "rpc_all",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "stacks",
    "stream",
    "traffic",
    "wait",
]

sys.modules[f"{__name__}.constants"] = constants
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
