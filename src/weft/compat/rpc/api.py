"""Calls, references and what goes with them, under the names of ``torch.distributed.rpc.api``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

import weft.rpc
from weft.agent import current as current_agent
from weft.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from weft.compat.rpc.internal import _internal_rpc_pickler
from weft.compat.rpc.calls import _thread_local_var, _wait_all, remote, rpc_async, rpc_sync
from weft.compat.rpc.references import PyRRef, RRef
from weft.rpc import WorkerInfo

_ignore_rref_leak = True
_default_pickler = _internal_rpc_pickler
_agent: Any = None


class AllGatherStates:
    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


def _is_current_rpc_agent_set() -> bool:
    return _agent is not None


def _get_current_rpc_agent() -> Any:
    if _agent is None:
        raise RuntimeError(
            "Current RPC agent is not set! Did you initialize the RPC framework "
            "(e.g. by calling `rpc.init_rpc`)?"
        )
    return _agent


def _set_and_start_rpc_agent(agent: Any) -> None:
    global _agent
    _agent = agent


def _reset_current_rpc_agent() -> None:
    global _agent
    _agent = None


def _init_rpc_states(agent: Any) -> None:
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _require_initialized(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not _is_current_rpc_agent_set():
            raise RuntimeError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return function(*args, **kwargs)

    return checked


@contextlib.contextmanager
def _use_rpc_pickler(pickler: Any) -> Iterator[None]:
    global _default_pickler
    _default_pickler = pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def get_rpc_timeout() -> float:
    return current_agent.current().default_timeout_s


def _set_rpc_timeout(timeout: float) -> None:
    current_agent.current().default_timeout_s = timeout


@_require_initialized
def get_worker_info(worker_name: Any = None) -> WorkerInfo:
    return weft.rpc.get_worker_info(worker_name)


def _all_gather(obj: Any, worker_names: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    raise NotImplementedError


def _broadcast_to_followers(sequence_id: Any, objects: Any) -> None:
    raise NotImplementedError


def _barrier(worker_names: Any) -> None:
    raise NotImplementedError


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    raise NotImplementedError


def _delete_all_user_and_unforked_owner_rrefs(timeout: Any = None) -> None:
    pass


def _rref_context_get_debug_info() -> dict[str, str]:
    return {
        "num_owner_rrefs": "0",
        "num_pending_futures": "0",
        "num_pending_users": "0",
        "num_forks": "0",
    }


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    try:
        weft.rpc.shutdown(graceful, timeout)
    finally:
        _reset_current_rpc_agent()
