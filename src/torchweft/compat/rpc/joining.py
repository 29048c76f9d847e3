"""``init_rpc`` under PyTorch's name, with its argument checks and its choice of a back-end."""

from __future__ import annotations

import logging
import numbers
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

import torchweft.rpc
from torchweft import knobs
from torchweft.compat import autograd as dist_autograd
from torchweft.compat.rpc import api, backend_registry
from torchweft.errors import AlreadyInitialized, ArgumentTypeError
from torchweft.free_threading import shared_count
from torchweft.patching import check_unpatched
from torchweft.rpc.torch_names import BackendOptions as RpcBackendOptions
from torchweft.rpc.torch_names import open_store

_log = logging.getLogger("torchweft")

_LONGEST_S = 365 * 24 * 3600.0

_groups = shared_count()
"""Numbers the groups that this process joins, whose stores may be one."""


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker of a group; see ``torchweft.rpc.init_rpc``.

    Args:
        name: Name of this worker, unique in the group.
        backend: A member of ``BackendType``; by default the back-end that fits the options.
        rank: Number of this worker.
        world_size: Number of workers; None for a group that workers may join and leave.
        rpc_backend_options: Options of the back-end.

    Raises:
        ArgumentTypeError: An argument is of a wrong type, or no back-end has such options.
        AlreadyInitialized: This process is a worker already.
    """
    if backend is not None and not isinstance(backend, backend_registry.Backend):
        raise ArgumentTypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise ArgumentTypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, not "
            f"a {type(rpc_backend_options).__name__}"
        )
    _check_unset()
    if backend is None:
        backend = _backend_for(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    # Check before other workers wait for this worker.
    knobs.check_environment()
    torchweft.rpc.RpcBackendOptions().check()
    store = _prefixed(open_store(rpc_backend_options, rank, world_size), rpc_backend_options)
    dist_autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_for(options: Any) -> Any:
    """Returns the back-end that has such options."""
    if options is None:
        return backend_registry.BackendType.TENSORPIPE
    for candidate in backend_registry.BackendType:
        if isinstance(options, _options_type(candidate)):
            if candidate.name != "TENSORPIPE":
                _log.warning(
                    "init_rpc was given no backend, and options of %r: takes that back-end, not "
                    "the usual one; pass backend=%r to say so",
                    candidate,
                    candidate,
                )
            return candidate
    raise ArgumentTypeError(
        f"Could not infer backend for options {options}; pass backend=, or options of one of "
        f"{', '.join(map(repr, backend_registry.BackendType))}"
    )


def _options_type(backend: Any) -> type[Any]:
    try:
        return type(backend_registry.construct_rpc_backend_options(backend))
    except Exception:  # It cannot make default options, so these options are not its own.
        return type(None)


def _prefixed(store: Store, options: Any) -> Store:
    """Returns a view of a store with the time limit of the options, and keys of this group only."""
    store.set_timeout(timedelta(seconds=min(options.rpc_timeout or _LONGEST_S, _LONGEST_S)))
    return PrefixStore(f"rpc_prefix_{next(_groups)}", store)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    """Raises ArgumentTypeError for the first argument of a wrong type."""
    wanted: tuple[tuple[Any, Any], ...] = (
        (backend, backend_registry.Backend),
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    )
    for value, kind in wanted:
        if not isinstance(value, kind):
            raise ArgumentTypeError(
                f"Argument {value} must be of type {kind} but got type {type(value)}"
            )


def _check_unset() -> None:
    check_unpatched()
    if api._is_current_rpc_agent_set():
        raise AlreadyInitialized("RPC is already initialized; call shutdown() first")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker of a group that meets at a store."""
    if backend is None:
        backend = backend_registry.BackendType.TENSORPIPE
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    _check_unset()
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    """Returns the state of references, agent and autograd of this worker, as text."""
    info: dict[str, str] = api._rref_context_get_debug_info()
    info.update(api._get_current_rpc_agent().get_debug_info())
    info.update(dist_autograd._get_debug_info())
    return info
