"""The names that programs take from ``torch._C._distributed_rpc``, meaning Weft."""

# ruff: noqa: F401

from weft.compat.rpc.absent import (
    RemoteProfilerManager,
    _cleanup_python_rpc_handler,
    _destroy_rref_context,
    _disable_jit_rref_pickle,
    _disable_server_process_global_profiler,
    _enable_jit_rref_pickle,
    _enable_server_process_global_profiler,
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
    _set_profiler_node_id,
)
from weft.compat.rpc.agents import RpcAgent, TensorPipeAgent
from weft.compat.rpc.api import (
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    enable_gil_profiling,
    get_rpc_timeout,
)
from weft.compat.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from weft.compat.rpc.options import RpcBackendOptions
from weft.compat.rpc.options import (
    TensorPipeRpcBackendOptions as _TensorPipeRpcBackendOptionsBase,
)
from weft.compat.rpc.references import PyRRef
from weft.ids import WorkerInfo
