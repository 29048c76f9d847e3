"""The profiler of all calls that a process serves, which raises ``NotSupported``."""

from __future__ import annotations

from typing import Any

from torchweft.compat.rpc.absent import FUNCTIONS, PROFILE, absent

__all__: list[str] = []

_enable_server_process_global_profiler = FUNCTIONS["_enable_server_process_global_profiler"]
_disable_server_process_global_profiler = FUNCTIONS["_disable_server_process_global_profiler"]


class _server_process_global_profile:
    """In PyTorch, profiles all calls that a process serves; here it raises NotSupported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        absent("_server_process_global_profile", PROFILE)()
