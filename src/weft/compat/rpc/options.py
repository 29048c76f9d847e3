"""Options of a worker under the names of PyTorch's."""

from __future__ import annotations

from typing import Any

from weft.compat.rpc import constants


class RpcBackendOptions:
    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    def __init__(
        self,
        *,
        num_worker_threads: int = 16,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Any = None,
        devices: Any = None,
        _transports: Any = None,
        _channels: Any = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps = device_maps or {}
        self.devices = devices or []
