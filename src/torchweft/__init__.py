"""Weft: RPC-based distributed training for PyTorch.

A training program calls functions on other workers (``torchweft.rpc``), holds references to objects
that live there (``torchweft.RRef``), backpropagates through all of it (``torchweft.autograd``), and
steps each parameter's optimizer where the parameter lives (``torchweft.optim``, ``torchweft.nn``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchweft.deferred import import_name
from torchweft.version import VERSION

if TYPE_CHECKING:
    from torchweft import (
        autograd,
        checkpoint,
        errors,
        launch,
        mapreduce,
        memory,
        nn,
        observe,
        optim,
        rpc,
    )
    from torchweft.engine.io.secure import TlsOptions
    from torchweft.errors import WeftError
    from torchweft.ids import WorkerInfo
    from torchweft.launch import cluster
    from torchweft.rpc import (
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
    from torchweft.secret import Secret

__version__ = VERSION

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
    "observe",
    "optim",
    "remote",
    "rpc",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_FOLDERS = frozenset(
    "autograd checkpoint errors launch mapreduce memory nn observe optim rpc".split()
)
_HOME = {
    "Secret": "torchweft.secret",
    "TlsOptions": "torchweft.engine.io.secure",
    "WeftError": "torchweft.errors",
    "WorkerInfo": "torchweft.ids",
    "cluster": "torchweft.launch",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: the command line and the launcher do without torch.
    if name in _FOLDERS:
        return import_name(__name__, name, f"torchweft.{name}")
    if name in __all__:
        return import_name(__name__, name, _HOME.get(name, "torchweft.rpc"))
    raise AttributeError(f"module 'torchweft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
