"""Calls under the names of ``torch.distributed.rpc.api``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

import weft.rpc
from weft.compat.rpc.constants import UNSET_RPC_TIMEOUT

_thread_local_var = threading.local()


def rpc_sync(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    return weft.rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    future = weft.rpc.rpc_async(to, func, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def remote(
    to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    return weft.rpc.remote(to, func, args, kwargs, timeout)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list
