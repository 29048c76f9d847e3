"""Options of a worker under PyTorch's names."""

from torchweft.rpc.options import BackendOptions as RpcBackendOptions
from torchweft.rpc.options import (
    TensorPipeRpcBackendOptions,
    _to_device,
    _to_device_list,
    _to_device_map,
)

_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
"""In PyTorch, the part of the class that is in C++."""

__all__ = [
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "_to_device",
    "_to_device_list",
    "_to_device_map",
]
