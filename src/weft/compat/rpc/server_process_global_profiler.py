"""The profiler of a whole process; there is none."""

_server_process_global_profile = None
