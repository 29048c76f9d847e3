"""Names of ``torch.distributed.rpc`` without an equivalent, and its modules that have names only.

A module that imports a name without an equivalent seldom calls it. So these names can be imported,
and a call raises ``NotSupported`` with the alternative.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any, NoReturn

from torchweft.errors import NotSupported
from torchweft.rpc import TensorPipeRpcBackendOptions, constants, functions
from torchweft.rpc.torch_names import BackendOptions

_CALL = "it is an entry point of PyTorch's C++ agent; call rpc_sync, rpc_async or remote"
_MEMBERSHIP = "it is a step of how PyTorch's agents keep an open group; Weft's do so by themselves"
_GATHER = "it is a step of how PyTorch's workers gather values; call _all_gather"
_SCRIPT = (
    "TorchScript modules cannot hold remote references; hand the reference on beside the module"
)
PROFILE = (
    "PyTorch's profiler records calls where they are made; what they do elsewhere is for a "
    "profiler that runs there"
)


def absent(name: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a function of that name that raises NotSupported, with an alternative."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"Weft has no {name}: {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises NotSupported: {instead}."
    return refuse


class RemoteProfilerManager:
    """In PyTorch, names the profiler's records on other workers; here it raises NotSupported."""

    set_current_profiling_key = staticmethod(absent("RemoteProfilerManager", PROFILE))


def _cleanup_python_rpc_handler() -> None:
    """Does nothing: PyTorch's frees objects of its C++ agent, and Weft has no such agent."""


class _server_process_global_profile:
    """In PyTorch, profiles all calls that a process serves; here it raises NotSupported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        absent("_server_process_global_profile", PROFILE)()


def _made(instead: str, *names: str) -> dict[str, Callable[..., NoReturn]]:
    return {name: absent(name, instead) for name in names}


MEMBERSHIP = _made(_MEMBERSHIP, "_group_membership_management", "_update_group_membership")
"""The functions of ``torch.distributed.rpc._utils``."""
_CALLS = {
    **_made(_CALL, "_invoke_rpc_builtin", "_invoke_rpc_python_udf", "_invoke_rpc_torchscript"),
    **_made(_CALL, "_invoke_remote_builtin", "_invoke_remote_python_udf"),
    **_made(_CALL, "_invoke_remote_torchscript"),
    **_made("shutdown() drops all references", "_destroy_rref_context"),
}
_PROFILERS = _made(
    PROFILE,
    "_enable_server_process_global_profiler",
    "_disable_server_process_global_profiler",
)
INTERNAL_STEPS = {
    **_CALLS,
    **MEMBERSHIP,
    **_made(_GATHER, "_gather_to_leader"),
    "_cleanup_python_rpc_handler": _cleanup_python_rpc_handler,
}
"""Those of ``torch.distributed.rpc.api``."""
FUNCTIONS = {
    **_CALLS,
    **_made(_SCRIPT, "_enable_jit_rref_pickle", "_disable_jit_rref_pickle"),
    **_made(PROFILE, "_set_profiler_node_id"),
    **_PROFILERS,
}
"""Those of ``torch.distributed.rpc``."""


def module_of(name: str, exported: list[str], names: dict[str, Any]) -> None:
    """Makes a module of this package that has only names from elsewhere."""
    module = module_from_spec(ModuleSpec(f"{__package__}.{name}", None))
    vars(module).update(names, __all__=exported)
    sys.modules[module.__name__] = module
    setattr(sys.modules[str(__package__)], name, module)


_OPTIONS = {
    "RpcBackendOptions": BackendOptions,
    "TensorPipeRpcBackendOptions": TensorPipeRpcBackendOptions,
    "_TensorPipeRpcBackendOptionsBase": TensorPipeRpcBackendOptions,
}
DEFAULTS = {
    "_DEFAULT_RPC_TIMEOUT_SEC": constants.DEFAULT_RPC_TIMEOUT_SEC,
    "_DEFAULT_INIT_METHOD": constants.DEFAULT_INIT_METHOD,
    "_DEFAULT_NUM_WORKER_THREADS": constants.DEFAULT_NUM_WORKER_THREADS,
    "_UNSET_RPC_TIMEOUT": constants.UNSET_RPC_TIMEOUT,
}
_CONSTANTS = [name for name in vars(constants) if name.startswith(("DEFAULT_", "UNSET_"))]
_DEFINED = {name: getattr(constants, name) for name in _CONSTANTS}
module_of("constants", _CONSTANTS, {**_DEFINED, **DEFAULTS})
module_of("functions", ["async_execution"], {"async_execution": functions.async_execution})
module_of("options", [name for name in _OPTIONS if not name.startswith("_Tensor")], _OPTIONS)
module_of("_utils", [], MEMBERSHIP)
module_of(
    "server_process_global_profiler",
    [],
    {**_PROFILERS, "_server_process_global_profile": _server_process_global_profile},
)
