"""The profiler of all calls that a process serves; there is none."""

from torchweft.compat.rpc.absent import (
    _disable_server_process_global_profiler,
    _enable_server_process_global_profiler,
    _server_process_global_profile,
)

__all__ = [
    "_disable_server_process_global_profiler",
    "_enable_server_process_global_profiler",
    "_server_process_global_profile",
]
