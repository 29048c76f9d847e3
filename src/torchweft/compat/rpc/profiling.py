"""Records calls as events of PyTorch's profiler, named as PyTorch names them.

An event lasts until the call has ended. It belongs to this worker: only a profiler on the callee
records what the callee does meanwhile.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.autograd.profiler import record_function

import torchweft.rpc
from torchweft.rpc.futures import fail
from torchweft.rpc.ordered_futures import OrderedFuture, wait_unseen

is_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler of PyTorch runs in this thread."""


class RPCExecMode(enum.Enum):
    """The ways to make a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


def build_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name under which a call appears in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def call_async(
    to: Any,
    function: Any,
    args: Any,
    kwargs: Any,
    timeout: float,
    mode: RPCExecMode = RPCExecMode.ASYNC,
) -> torch.futures.Future[Any]:
    """Does the same as ``torchweft.rpc.rpc_async``, with an event if a profiler runs."""
    if not is_enabled():
        return torchweft.rpc.rpc_async(to, function, args, kwargs, timeout)
    with record_function(key_of(mode, function, to)) as event:
        future = torchweft.rpc.rpc_async(to, function, args, kwargs, timeout)
        return end_with(event, future)


def create(
    to: Any, function: Any, args: Any, kwargs: Any, timeout: float
) -> torchweft.rpc.RRef[Any]:
    """Does the same as ``torchweft.rpc.remote``, with an event that ends when the value is made."""
    with record_function(key_of(RPCExecMode.REMOTE, function, to)) as event:
        reference: Any = torchweft.rpc.remote(to, function, args, kwargs, timeout)
        reference._watch_creation(timeout)
        reference._set_profiling_future(end_with(event, reference._get_future()))
        return reference  # type: ignore[no-any-return]


def end_with(
    event: record_function, future: torch.futures.Future[Any]
) -> torch.futures.Future[Any]:
    """Ends ``event`` with ``future``; returns a future of the same result, done afterwards."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    event._call_end_callbacks_on_future(ended)
    result: OrderedFuture[Any] = OrderedFuture()

    def pass_on(done: torch.futures.Future[Any]) -> None:
        ended.set_result(None)
        try:
            result.set_result(wait_unseen(done))
        except Exception as error:
            fail(result, error)

    future.add_done_callback(pass_on)
    return result


def key_of(mode: RPCExecMode, function: Any, to: Any) -> str:
    """Returns the event name of a call that this worker makes."""
    here, there = torchweft.rpc.get_worker_info().name, torchweft.rpc.get_worker_info(to).name
    return build_key(mode, name_of(function), here, there)


def name_of(function: Any) -> str:
    """Returns the name under which a profiler shows a function."""
    builtin = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if builtin is not None:
        return str(builtin)
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return str(getattr(function, "__qualname__", repr(function)))
