"""Stands for ``torch._C._distributed_rpc``: programs take some names of RPC from there."""

from __future__ import annotations

from typing import Any

from torchweft.compat import rpc
from torchweft.compat.rpc.options import TensorPipeRpcBackendOptions

_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # those that say what kind of module this is
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(rpc, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(rpc)})
