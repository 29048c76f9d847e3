"""Provides the names of ``torch.distributed.rpc``, implemented by Weft.

``__all__`` is as short as PyTorch's; programs find the other names here as well. A name without an
equivalent raises only when it is called, and names the alternative: a module that imports such a
name seldom calls it.
"""

# ruff: noqa: F401

from __future__ import annotations

import logging
from typing import Any

from torchweft.compat import autograd as dist_autograd
from torchweft.compat.rpc import api, backend_registry, internal, names
from torchweft.compat.rpc.agents import RpcAgent, TensorPipeAgent
from torchweft.compat.rpc.api import (
    AllGatherStates,
    _all_gather,
    _barrier,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _use_rpc_pickler,
    _wait_all,
    _wait_all_workers,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from torchweft.compat.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from torchweft.compat.rpc.joining import (
    _get_debug_info,
    _init_rpc_backend,
    _validate_rpc_args,
    init_rpc,
)
from torchweft.compat.rpc.names import (
    RemoteProfilerManager,
    _cleanup_python_rpc_handler,
    _server_process_global_profile,
)
from torchweft.compat.rpc.references import PyRRef, RRef
from torchweft.ids import WorkerInfo
from torchweft.rpc import TensorPipeRpcBackendOptions
from torchweft.rpc.torch_names import BackendOptions as RpcBackendOptions

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "backend_registered",
    "construct_rpc_backend_options",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger("torchweft")

_is_tensorpipe_available = True
"""Whether there is a back-end of that name; programs check this before they request it."""


def __getattr__(name: str) -> Any:
    if name == "BackendType":  # Each registration replaces it.
        return backend_registry.BackendType
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "BackendType"])


def is_available() -> bool:
    """Whether RPC can be used here: always."""
    return True


_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
"""In PyTorch, the part of the class that is in C++."""

globals().update({**names.FUNCTIONS, **names.DEFAULTS})
