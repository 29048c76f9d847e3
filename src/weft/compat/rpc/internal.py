"""Pickling of calls, for programs that look into it."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class RPCExecMode(enum.Enum):
    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    msg: str
    exception_type: Any


class _InternalRPCPickler:
    def serialize(self, obj: Any) -> Any:
        raise NotImplementedError

    def deserialize(self, binary_data: bytes, tensor_table: Any) -> Any:
        raise NotImplementedError

    def _register_reducer(self, obj_class: Any, reducer: Any) -> None:
        pass


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> Any:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Any) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
