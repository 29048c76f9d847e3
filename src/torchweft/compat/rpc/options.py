"""Options of a worker under PyTorch's names."""

from torchweft.rpc.options import BackendOptions as RpcBackendOptions
from torchweft.rpc.options import (
    TensorPipeRpcBackendOptions,
    _to_device,
    _to_device_list,
    _to_device_map,
)

__all__ = [
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "_to_device",
    "_to_device_list",
    "_to_device_map",
]
