"""The names of ``torch.distributed.rpc``, meaning Weft."""

from __future__ import annotations

import logging
import numbers
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.compat import autograd as dist_autograd
from weft.compat.rpc import api, backend_registry, constants, functions, internal, options
from weft.compat.rpc.agents import RpcAgent, TensorPipeAgent
from weft.compat.rpc.api import (
    AllGatherStates,
    PyRRef,
    RRef,
    WorkerInfo,
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
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from weft.compat.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from weft.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions

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

logger = logging.getLogger("weft")

_group_lock = threading.Lock()
_group_count = 0


def is_available() -> bool:
    """Whether RPC can be used here: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker of a group; see ``weft.rpc.init_rpc``.

    Args:
        name: Name of this worker, unique in the group.
        backend: A member of ``BackendType``; by default what fits the options.
        rank: Number of this worker.
        world_size: Number of workers; None for a group that workers may join and leave.
        rpc_backend_options: Options of the back-end.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_for(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = construct_rpc_backend_options(backend)
    store = _open_store(rpc_backend_options, rank, world_size)
    dist_autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_for(given: Any) -> Any:
    if given is None:
        return backend_registry.BackendType["TENSORPIPE"]
    for candidate in backend_registry.BackendType:
        if type(construct_rpc_backend_options(candidate)) is type(given):
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _open_store(given: Any, rank: int, world_size: int | None) -> Any:
    global _group_count
    if world_size:
        store, _, _ = next(dist.rendezvous(given.init_method, rank=rank, world_size=world_size))
    else:
        store = dist._create_store_from_options(given, rank)
    store.set_timeout(timedelta(seconds=given.rpc_timeout))
    with _group_lock:
        store = dist.PrefixStore(f"rpc_prefix_{_group_count}", store)
        _group_count += 1
    return store


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    backend = backend_registry.BackendType["TENSORPIPE"] if backend is None else backend
    for value, wanted in (
        (backend, backend_registry.BackendType),
        (store, dist.Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(value, wanted):
            raise RuntimeError(
                f"Argument {value} must be of type {wanted} but got type {type(value)}"
            )
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    info = _rref_context_get_debug_info()
    info.update(_get_current_rpc_agent().get_debug_info())
    info.update(dist_autograd._get_debug_info())
    return info
