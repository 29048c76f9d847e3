"""Names of PyTorch's C++ agent without an equivalent.

A module that imports such a name seldom calls it. So they can be imported, and a call raises
``NotSupported`` with the alternative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torchweft.errors import NotSupported

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


_ALTERNATIVES = {
    "_invoke_rpc_builtin": _CALL,
    "_invoke_rpc_python_udf": _CALL,
    "_invoke_rpc_torchscript": _CALL,
    "_invoke_remote_builtin": _CALL,
    "_invoke_remote_python_udf": _CALL,
    "_invoke_remote_torchscript": _CALL,
    "_destroy_rref_context": "shutdown() drops all references",
}
_ALTERNATIVES_OF_PACKAGE = {
    "_enable_jit_rref_pickle": _SCRIPT,
    "_disable_jit_rref_pickle": _SCRIPT,
    "_set_profiler_node_id": PROFILE,
    "_enable_server_process_global_profiler": PROFILE,
    "_disable_server_process_global_profiler": PROFILE,
}
_ALTERNATIVES_OF_MEMBERSHIP = {
    "_group_membership_management": _MEMBERSHIP,
    "_update_group_membership": _MEMBERSHIP,
}


def _made(alternatives: dict[str, str]) -> dict[str, Callable[..., NoReturn]]:
    return {name: absent(name, instead) for name, instead in alternatives.items()}


MEMBERSHIP = _made(_ALTERNATIVES_OF_MEMBERSHIP)
"""The functions of ``torch.distributed.rpc._utils``."""
INTERNAL_STEPS = {
    **_made(_ALTERNATIVES),
    **MEMBERSHIP,
    **_made({"_gather_to_leader": _GATHER}),
    "_cleanup_python_rpc_handler": _cleanup_python_rpc_handler,
}
"""Those of ``torch.distributed.rpc.api``."""
FUNCTIONS = {**_made(_ALTERNATIVES), **_made(_ALTERNATIVES_OF_PACKAGE)}
"""Those of ``torch.distributed.rpc``."""
