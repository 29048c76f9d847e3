"""Provides calls, references and related functions of ``torch.distributed.rpc.api``.

Programs and tests replace names of this module, so names looked up here at each use must stay so.
"""

# ruff: noqa: F401

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import profiler

import torchweft.rpc
from torchweft.compat.rpc import names
from torchweft.compat.rpc.agents import RpcAgent, TensorPipeAgent
from torchweft.compat.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    pickled_call,
)
from torchweft.compat.rpc.names import RemoteProfilerManager
from torchweft.compat.rpc.references import PyRRef, RRef
from torchweft.compat.waiting import _thread_local_var, _wait_all, note_future
from torchweft.errors import ConfigurationError, NotInitialized, ShutdownError, WorkerLost
from torchweft.ids import WorkerInfo
from torchweft.rpc import UNSET_RPC_TIMEOUT, OrderedFuture, constants, torch_names

__all__ = [
    "AllGatherStates",
    "PyRRef",
    "RRef",
    "WorkerInfo",
    "_thread_local_var",
    "_wait_all",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

DEFAULT_SHUTDOWN_TIMEOUT = constants.DEFAULT_SHUTDOWN_TIMEOUT

_ignore_rref_leak = True
"""Whether ``shutdown`` ignores remaining references that it has no permission to drop."""

_default_pickler = _internal_rpc_pickler
_agent: Any = None

_MOST_NAMED = 16

globals().update(names.INTERNAL_STEPS)


class AllGatherStates:
    """The state of an ``_all_gather`` that a program writes itself; Weft's own needs none here.

    Attributes:
        gathered_objects: The values by worker name.
        proceed_signal: Set when all values have come.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


def _is_current_rpc_agent_set() -> bool:
    return _agent is not None


def _get_current_rpc_agent() -> Any:
    if _agent is None:
        raise NotInitialized(
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


if hasattr(os, "register_at_fork"):  # Only the parent is the worker.
    os.register_at_fork(after_in_child=_reset_current_rpc_agent)


def _init_rpc_states(agent: Any) -> None:
    # A back-end may have set it already.
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _require_initialized(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not _is_current_rpc_agent_set():
            raise NotInitialized(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return func(*args, **kwargs)

    return checked


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# Calls


def rpc_sync(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Runs a function on another worker and returns its result; see ``torchweft.rpc.rpc_sync``."""
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = pickled_call(_default_pickler, func, args, kwargs)
    return torchweft.rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Starts a function on another worker; see ``torchweft.rpc.rpc_async``."""
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = pickled_call(_default_pickler, func, args, kwargs)
    future: torch.futures.Future[Any]
    try:
        future = torchweft.rpc.rpc_async(to, func, args, kwargs, timeout)
    except WorkerLost as error:
        # Programs expect the error when they wait, as if the worker had been lost a moment later.
        future = OrderedFuture()
        future.set_exception(error)
    note_future(future)
    return future


def remote(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Starts a function on another worker, which keeps the result; see ``torchweft.rpc.remote``.

    Args:
        to: The worker.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        timeout: Seconds after which the value counts as not made: using the reference then raises
            an error. By default, or with 0, uses of the reference wait without a limit.
    """
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = pickled_call(_default_pickler, func, args, kwargs)
    reference: Any = torchweft.rpc.remote(to, func, args, kwargs, timeout)
    if timeout > 0:
        reference._watch_creation(timeout)
    return reference


# Options and information


get_rpc_timeout = torchweft.rpc.get_rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    if timeout < 0:
        raise ConfigurationError(f"a timeout of {timeout} s cannot work; pass 0 for no limit")
    torch_names.set_default_timeout(timeout)


@_require_initialized
def get_worker_info(worker_name: Any = None) -> WorkerInfo:
    """Returns a worker's name and rank; see ``torchweft.rpc.get_worker_info``."""
    return torchweft.rpc.get_worker_info(worker_name)


def _to_worker_info(to: Any) -> WorkerInfo:
    """Returns the ``WorkerInfo`` of a worker that is given by name, by rank or by itself."""
    return torchweft.rpc.get_worker_info(to)


def _get_should_profile() -> bool:
    """Returns whether a profiler of PyTorch runs."""
    return profiler._is_profiler_enabled


def _rref_typeof_on_owner(rref: Any, blocking: bool = True) -> Any:
    """Returns the type of the value behind a reference of this worker; see ``RRef._get_type``."""
    return rref._get_type(blocking=blocking)


def _rref_typeof_on_user(
    rref: Any, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
) -> Any:
    """Returns the type of the value behind a reference; see ``RRef._get_type``."""
    return rref._get_type(timeout, blocking)


def enable_gil_profiling(flag: bool) -> None:
    """Sets whether ``get_debug_info`` of the agent says how long threads wait for Python."""
    _get_current_rpc_agent().enable_gil_profiling(flag)


@_require_initialized
def _rref_context_get_debug_info() -> dict[str, str]:
    return torch_names.debug_info().references


# Collectives


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchanges a value with other workers; see ``torchweft.rpc.all_gather``.

    Args:
        obj: The value of this worker.
        worker_names: The workers that take part; None, or an empty list, for all.
        timeout: Seconds for each call and for waiting for the others; 0 for no limit. By default
            the worker's limit for each call, and none for waiting.

    Raises:
        CallError: The values could not be sent to some workers; the message says which.
    """
    return torch_names.gather("_all_gather", obj, worker_names, timeout, _broadcast_to_followers)


@torch_names.remotely_callable_unless_strict
def _broadcast_to_followers(sequence_id: Any, objects_map: dict[str, Any]) -> None:
    """Tells a follower all values. A program may put another function in its place there."""
    torch_names.tell(sequence_id, objects_map)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    # No names mean all workers, as for `_all_gather`.
    torchweft.rpc.barrier(set(worker_names) or None, timeout=0)


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    torch_names.gather("shutdown", None, None, timeout, _broadcast_to_followers)


# Shutdown


def _delete_all_user_and_unforked_owner_rrefs(timeout: Any = None) -> None:
    """Permits dropping all references of this worker.

    The ``join`` that follows in ``shutdown`` drops them, when no call of the group can need them
    any more, and waits until all owners know of it.
    """
    agent = _get_current_rpc_agent()
    if isinstance(agent, RpcAgent):
        agent.drop_references()


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the group; see ``torchweft.rpc.shutdown``.

    Args:
        graceful: Whether to wait for the others. If not, calls that wait for this worker fail.
        timeout: Seconds to wait at most for all workers to call this, and again for all calls to
            end; 0 for no limit.

    Raises:
        ShutdownError: The shutdown failed, a worker was lost, or references were left that may not
            be dropped; the message says which. This worker has left nevertheless.
        CallTimeout: Some workers did not arrive in time. This worker has left nevertheless.
    """
    agent = _get_current_rpc_agent()
    try:
        if graceful and isinstance(agent, RpcAgent) and agent.is_static_group:
            _await_all(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
        if graceful and hasattr(agent, "join"):  # A program's own back-end may lack it.
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _await_all(timeout: float) -> None:
    try:
        _wait_all_workers(timeout)
    except WorkerLost as error:
        raise ShutdownError(
            f"shut down without every worker: {error}", missing=(error.worker,)
        ) from None


def _finalize_shutdown() -> None:
    agent = _get_current_rpc_agent()
    try:
        if hasattr(agent, "shutdown"):
            agent.shutdown()
        torchweft.rpc.shutdown(graceful=False)  # In case the agent has not done so.
        if not _ignore_rref_leak:
            _check_leaks(getattr(agent, "held_at_end", ()))
    finally:
        _reset_current_rpc_agent()


def _check_leaks(held: Iterable[str]) -> None:
    lines = list(held)
    if lines:
        more = f"; and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
        raise ShutdownError(
            f"Leaking RRefs: {'; '.join(lines[:_MOST_NAMED])}{more}. Drop them before shutdown, or "
            "set rpc.api._ignore_rref_leak"
        )
