"""Names of PyTorch's that can have no meaning here: calling one says so, and what there is instead.

They exist because a module that imports one seldom calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchweft.errors import NotSupported


def absent(name: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a function that raises NotSupported."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"Weft has no {name}: {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises NotSupported: {instead}."
    return refuse


_CALL = "it is an entry point of PyTorch's C++ agent; call rpc_sync, rpc_async or remote"
_PROFILE = (
    "PyTorch's profiler records calls where they are made; what they do elsewhere is for a "
    "profiler that runs there"
)
_SCRIPT = (
    "TorchScript modules cannot hold remote references; hand the reference on beside the module"
)
_MEMBERSHIP = "workers of an open group find each other; call init_rpc without world_size"

_invoke_rpc_builtin = absent("_invoke_rpc_builtin", _CALL)
_invoke_rpc_python_udf = absent("_invoke_rpc_python_udf", _CALL)
_invoke_rpc_torchscript = absent("_invoke_rpc_torchscript", _CALL)
_invoke_remote_builtin = absent("_invoke_remote_builtin", _CALL)
_invoke_remote_python_udf = absent("_invoke_remote_python_udf", _CALL)
_invoke_remote_torchscript = absent("_invoke_remote_torchscript", _CALL)

_enable_jit_rref_pickle = absent("_enable_jit_rref_pickle", _SCRIPT)
_disable_jit_rref_pickle = absent("_disable_jit_rref_pickle", _SCRIPT)

_set_profiler_node_id = absent("_set_profiler_node_id", _PROFILE)
_enable_server_process_global_profiler = absent("_enable_server_process_global_profiler", _PROFILE)
_disable_server_process_global_profiler = absent(
    "_disable_server_process_global_profiler", _PROFILE
)

_group_membership_management = absent("_group_membership_management", _MEMBERSHIP)
_update_group_membership = absent("_update_group_membership", _MEMBERSHIP)

_destroy_rref_context = absent("_destroy_rref_context", "shutdown() drops all references")


class RemoteProfilerManager:
    """Would name what PyTorch's profiler records on other workers."""

    set_current_profiling_key = staticmethod(absent("RemoteProfilerManager", _PROFILE))


class _server_process_global_profile:
    """Would profile all calls that a process serves.

    Raises:
        NotSupported: Always.
    """

    __init__ = absent("_server_process_global_profile", _PROFILE)


def _cleanup_python_rpc_handler() -> None:
    """Does nothing: PyTorch's frees Python objects that its C++ agent holds, and there is none."""
