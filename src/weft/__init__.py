"""Weft: RPC-based distributed training for PyTorch.

A training program calls functions on other workers (``weft.rpc``), holds references to objects
that live there (``weft.RRef``), backpropagates through all of it (``weft.autograd``), and steps
each parameter's optimizer where the parameter lives (``weft.optim``, ``weft.nn``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import autograd, checkpoint, errors, launch, mapreduce, memory, nn, optim, rpc
    from weft.errors import WeftError
    from weft.ids import WorkerInfo
    from weft.launch import cluster
    from weft.rpc import (
        Future,
        RpcBackendOptions,
        RRef,
        get_worker_info,
        init_rpc,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
    )
    from weft.secret import Secret
    from weft.transport.secure import TlsOptions

__version__ = "0.1.0"

__all__ = [
    "Future",
    "RRef",
    "RpcBackendOptions",
    "Secret",
    "TlsOptions",
    "WeftError",
    "WorkerInfo",
    "autograd",
    "checkpoint",
    "cluster",
    "errors",
    "get_worker_info",
    "init_rpc",
    "launch",
    "mapreduce",
    "memory",
    "nn",
    "optim",
    "remote",
    "rpc",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_FOLDERS = frozenset("autograd checkpoint errors launch mapreduce memory nn optim rpc".split())
_HOME = {
    "Secret": "weft.secret",
    "TlsOptions": "weft.transport.secure",
    "WeftError": "weft.errors",
    "WorkerInfo": "weft.ids",
    "cluster": "weft.launch",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: the command line and the launcher do without torch.
    if name in _FOLDERS:
        return importlib.import_module(f"weft.{name}")
    if name in __all__:
        return getattr(importlib.import_module(_HOME.get(name, "weft.rpc")), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
