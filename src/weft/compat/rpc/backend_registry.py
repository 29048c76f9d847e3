"""The registry of back-ends; there is one, and programs may add theirs."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from weft.compat.rpc import constants


class BackendValue(NamedTuple):
    construct_rpc_backend_options_handler: Any
    init_backend_handler: Any


BackendType: Any = enum.Enum("BackendType", {})


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str, construct_rpc_backend_options_handler: Any, init_backend_handler: Any
) -> Any:
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(
        construct_rpc_backend_options_handler, init_backend_handler
    )
    BackendType = enum.Enum("BackendType", members)
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = 16,
    _transports: Any = None,
    _channels: Any = None,
    **kwargs: Any,
) -> Any:
    from weft.compat.rpc.options import TensorPipeRpcBackendOptions

    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout, init_method=init_method, num_worker_threads=num_worker_threads
    )


def _tensorpipe_init(
    store: Any, name: str, rank: int, world_size: Any, rpc_backend_options: Any
) -> Any:
    import weft.rpc
    from weft.compat.rpc.agents import TensorPipeAgent

    weft.rpc.init_rpc(
        name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=weft.rpc.RpcBackendOptions(
            num_worker_threads=rpc_backend_options.num_worker_threads,
            rpc_timeout=rpc_backend_options.rpc_timeout,
            store=store,
        ),
    )
    return TensorPipeAgent()


register_backend("TENSORPIPE", _tensorpipe_options, _tensorpipe_init)
