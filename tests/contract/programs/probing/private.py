"""Names that are not documented but that public programs use."""

import operator
import pickle
from typing import get_type_hints

import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api, backend_registry, constants

from probing.calls import PEER, identity
from probing.registry import failing, probe


@api._require_initialized
def needs_rpc():
    return "initialized"


@probe
def the_agent():
    agent = rpc._get_current_rpc_agent()
    infos = sorted(agent.get_worker_infos(), key=lambda info: info.id)
    return [
        [[info.name, info.id] for info in infos],
        [
            agent.get_worker_info().name,
            agent.get_worker_info(PEER).id,
            agent.get_worker_info(1).name,
        ],
        isinstance(agent, rpc.TensorPipeAgent),
        [rpc._is_current_rpc_agent_set(), rpc.api._is_current_rpc_agent_set()],
        needs_rpc(),
        rpc.is_available(),
    ]


@probe
def names_of_the_extension_module():
    from torch._C._distributed_rpc import PyRRef, WorkerInfo, _is_current_rpc_agent_set

    reference, info = rpc.remote(PEER, identity, args=(1,)), rpc.get_worker_info()
    return [
        _is_current_rpc_agent_set(),
        isinstance(reference, PyRRef),
        isinstance(info, WorkerInfo),
    ]


@probe
def waiting_for_all_calls_of_a_block():
    with rpc.api._wait_all():
        futures = [rpc.rpc_async(PEER, operator.add, args=(i, 1)) for i in range(3)]
    return [future.value() for future in futures if future.done()]


@probe
def the_default_timeout():
    before = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(17.5)
    between = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(before)
    return [before, between, constants.DEFAULT_RPC_TIMEOUT_SEC, constants.UNSET_RPC_TIMEOUT]


@probe
def backends_and_options():
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=20, _transports=["uv"], _channels=["basic"]
    )
    options.rpc_timeout, options.init_method, options.num_worker_threads = 30, "env://", 9
    made = backend_registry.construct_rpc_backend_options(
        rpc.BackendType.TENSORPIPE, rpc_timeout=5, init_method="tcp://localhost:1"
    )
    return [
        [options.rpc_timeout, options.init_method, options.num_worker_threads],
        [options.device_maps, options.devices],
        [made.rpc_timeout, made.init_method, made.num_worker_threads, type(made).__name__],
        [rpc.BackendType.TENSORPIPE.name, backend_registry.backend_registered("TENSORPIPE")],
        isinstance(options, rpc.RpcBackendOptions),
        str(rpc.BackendType.TENSORPIPE),
        failing(lambda: rpc.TensorPipeRpcBackendOptions(device_maps={PEER: {"cpu": "cuda:0"}})),
    ]


@probe
def counts_of_references():
    kept = rpc.remote(PEER, identity, args=(1,))
    kept.to_here()
    here = rpc._rref_context_get_debug_info()
    there = rpc.rpc_sync(PEER, rpc._rref_context_get_debug_info)
    names = {"num_forks", "num_owner_rrefs", "num_pending_futures", "num_pending_users"}
    return [names <= set(here), names <= set(there), int(there["num_owner_rrefs"]) >= 1]


@probe
def public_names():
    wanted = """RRef PyRRef WorkerInfo RpcAgent TensorPipeAgent RpcBackendOptions functions internal
        TensorPipeRpcBackendOptions BackendType init_rpc shutdown rpc_sync rpc_async remote
        get_worker_info get_rpc_timeout is_available api options constants backend_registry
        AllGatherStates _UNSET_RPC_TIMEOUT enable_gil_profiling RemoteProfilerManager
        _cleanup_python_rpc_handler _invoke_rpc_python_udf _disable_server_process_global_profiler
        dist_autograd"""
    return [name for name in wanted.split() if not hasattr(rpc, name)]


@probe
def contexts_by_hand():
    import torch.distributed.autograd as dist_autograd
    from torch.distributed.autograd import DistAutogradContext, get_gradients

    made = dist_autograd._new_context()
    number = made._context_id()
    leaf = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync(PEER, torch.mul, args=(leaf, 3)).sum()
    dist_autograd.backward(contextId=number, roots=[loss], retain_graph=False)
    found = [
        isinstance(made, DistAutogradContext),
        dist_autograd._current_context()._context_id() == number,
        dist_autograd._retrieve_context(number)._known_worker_ids(),
        dist_autograd._is_valid_context(number),
        get_gradients(number)[leaf].tolist(),
        number <= dist_autograd._get_max_id(),
    ]
    found[2] = found[2] == {rpc.get_worker_info(PEER).id}
    dist_autograd._release_context(number)
    texts = "Could not find autograd context with id", "doesn't have a valid autograd context"
    return [
        found,
        failing(lambda: dist_autograd._is_valid_context(number), texts[0]),
        failing(lambda: dist_autograd._current_context(), texts[1]),
    ]


@probe
def texts_and_annotations():
    def use(first: rpc.RRef[int], others: list[rpc.RRef[torch.Tensor]]) -> rpc.RRef | None:
        return first

    reference = rpc.RRef[int](4)
    info = rpc.get_worker_info(PEER)
    return [
        [reference.to_here(), sorted(get_type_hints(use))],
        [repr(info), str(info), pickle.loads(pickle.dumps(info)) == info],
        [isinstance(reference, rpc.RRef), isinstance(reference, rpc.PyRRef)],
        rpc.api._to_worker_info(PEER) == info,
        rpc.api._rref_typeof_on_owner(reference).__name__,
    ]
