"""Calls under the names of ``torch.distributed.rpc.api``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

import torchweft.rpc
from torchweft.compat.rpc import api, profiling  # api imports this module in turn
from torchweft.compat.rpc.constants import UNSET_RPC_TIMEOUT
from torchweft.compat.rpc.internal import RPCExecMode, _internal_rpc_pickler
from torchweft.compat.rpc.pickled_calls import pickled_call
from torchweft.errors import WorkerLost
from torchweft.rpc.futures import fail

_thread_local_var = threading.local()


def rpc_sync(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Runs a function on another worker and returns its result; see ``torchweft.rpc.rpc_sync``."""
    if api._default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = pickled_call(api._default_pickler, func, args, kwargs)
    if profiling.is_enabled():
        return profiling.call_async(to, func, args, kwargs, timeout, RPCExecMode.SYNC).wait()
    return torchweft.rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Starts a function on another worker; see ``torchweft.rpc.rpc_async``."""
    if api._default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = pickled_call(api._default_pickler, func, args, kwargs)
    try:
        future = profiling.call_async(to, func, args, kwargs, timeout)
    except WorkerLost as error:
        # Programs look for it where they wait, as if the worker had been lost a moment later.
        future = torch.futures.Future()
        fail(future, error)
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
        timeout: Seconds after which the value counts as not made: using the reference raises
            that. By default, or with 0, whoever uses the reference waits as long as he likes.
    """
    if api._default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = pickled_call(api._default_pickler, func, args, kwargs)
    if profiling.is_enabled():
        return profiling.create(to, func, args, kwargs, timeout)
    reference: Any = torchweft.rpc.remote(to, func, args, kwargs, timeout)
    if timeout > 0:
        reference._watch_creation(timeout)
    return reference


def note_future(future: torch.futures.Future[Any]) -> None:
    """Has the ``_wait_all`` around it, if there is one, wait for a call."""
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at the end of the block, for all calls that the block has started."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list
