"""Names of ``torch.distributed.rpc`` that ``torchweft.rpc`` lacks, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable

from torchweft.arguments import did_you_mean

INSTEAD = {
    "_all_gather": "use torchweft.rpc.all_gather",
    "_barrier": "use torchweft.rpc.barrier",
    "_delete_all_user_and_unforked_owner_rrefs": "shutdown() drops all references",
    "_get_current_rpc_agent": "torchweft.rpc.get_worker_info and health tell of this worker",
    "_is_current_rpc_agent_set": "get_worker_info raises NotInitialized where there is no worker",
    "_set_rpc_timeout": "pass rpc_timeout to RpcBackendOptions, or timeout to the call",
    "_wait_all": "use torch.futures.wait_all",
    "_wait_all_workers": "use torchweft.rpc.barrier",
}

_OF_PYTORCH = frozenset(
    """
    AllGatherStates BackendValue RpcAgent TensorPipeAgent api backend_registered backend_registry
    construct_rpc_backend_options enable_gil_profiling init_backend internal register_backend
    rref_proxy server_process_global_profiler
    """.split()
)
"""Internal names, and names of the back-end registry, that only ``torchweft.compat`` has."""


def explain(name: str, names: Iterable[str]) -> str:
    """Returns the message of the AttributeError for a name that is not in ``names``."""
    text = f"module 'torchweft.rpc' has no attribute {name!r}"
    if name in INSTEAD:
        return f"{text}; {INSTEAD[name]}"
    if name in _OF_PYTORCH:
        return (
            f"{text}, which torch.distributed.rpc has; a program that needs it runs unchanged "
            "under python -m torchweft.compat"
        )
    return text + did_you_mean(name, names)
