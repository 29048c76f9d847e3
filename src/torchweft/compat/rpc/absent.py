"""PyTorch names without an equivalent here: calling one raises and names the alternative.

The names exist because a module that imports such a name seldom calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchweft.errors import NotSupported

_CALL = "it is an entry point of PyTorch's C++ agent; call rpc_sync, rpc_async or remote"
_PROFILE = (
    "PyTorch's profiler records calls where they are made; what they do elsewhere is for a "
    "profiler that runs there"
)
_SCRIPT = (
    "TorchScript modules cannot hold remote references; hand the reference on beside the module"
)

_INSTEAD = {
    "_invoke_rpc_builtin": _CALL,
    "_invoke_rpc_python_udf": _CALL,
    "_invoke_rpc_torchscript": _CALL,
    "_invoke_remote_builtin": _CALL,
    "_invoke_remote_python_udf": _CALL,
    "_invoke_remote_torchscript": _CALL,
    "_enable_jit_rref_pickle": _SCRIPT,
    "_disable_jit_rref_pickle": _SCRIPT,
    "_set_profiler_node_id": _PROFILE,
    "_enable_server_process_global_profiler": _PROFILE,
    "_disable_server_process_global_profiler": _PROFILE,
    "_server_process_global_profile": _PROFILE,
    "_destroy_rref_context": "shutdown() drops all references",
}


def _absent(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"Weft has no {name}: {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises NotSupported: {instead}."
    return refuse


FUNCTIONS = {name: _absent(name, instead) for name, instead in _INSTEAD.items()}
"""The functions that raise NotSupported, by name."""


class RemoteProfilerManager:
    """In PyTorch, names the profiler's records on other workers; here it raises NotSupported."""

    set_current_profiling_key = staticmethod(_absent("RemoteProfilerManager", _PROFILE))


def _cleanup_python_rpc_handler() -> None:
    """Does nothing: PyTorch's frees objects of its C++ agent, and Weft has no such agent."""
