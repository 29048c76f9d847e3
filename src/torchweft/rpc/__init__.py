"""Remote execution: calls to other workers, and references to values that live there.

The names and their meaning are those of ``torch.distributed.rpc``.
"""

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

# Names of ``torch.distributed.rpc`` that this module lacks, and what to use instead.

_INSTEAD = {
    "_all_gather": "use torchweft.rpc.all_gather",
    "_barrier": "use torchweft.rpc.barrier",
    "_delete_all_user_and_unforked_owner_rrefs": "shutdown() drops all references",
    "_get_current_rpc_agent": "torchweft.rpc.get_worker_info and health tell of this worker",
    "_is_current_rpc_agent_set": "get_worker_info raises NotInitialized where there is no worker",
    "_set_rpc_timeout": "pass rpc_timeout to RpcBackendOptions, or timeout to the call",
    "_wait_all": "use torch.futures.wait_all",
    "_wait_all_workers": "use torchweft.rpc.barrier",
}

_OF_PYTORCH = frozenset(
    """
    AllGatherStates BackendValue RpcAgent TensorPipeAgent api backend_registered backend_registry
    construct_rpc_backend_options enable_gil_profiling init_backend internal register_backend
    rref_proxy server_process_global_profiler
    """.split()
)
"""Internal names, and names of the back-end registry, that only ``torchweft.compat`` has."""


def __getattr__(name: str) -> Any:
    text = f"module 'torchweft.rpc' has no attribute {name!r}"
    if name in _INSTEAD:
        text += f"; {_INSTEAD[name]}"
    elif name in _OF_PYTORCH:
        text += (
            ", which torch.distributed.rpc has; a program that needs it runs unchanged under "
            "python -m torchweft.compat"
        )
    elif name in functions.__all__:
        text += f"; use torchweft.rpc.functions.{name}"
    else:
        text += did_you_mean(name, __all__)
    raise AttributeError(text)
