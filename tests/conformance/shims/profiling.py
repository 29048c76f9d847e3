"""Events of calls for PyTorch's legacy profiler, as far as tests pass that look for them.

An event lasts until the call has ended. It is this worker's: what the callee does meanwhile is
for a profiler that runs there.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.autograd.profiler import record_function

import torchweft.rpc
from torchweft.compat.rpc import internal
from torchweft.compat.rpc.references import RRef
from torchweft.rpc.futures import fail

is_enabled = torch.autograd._profiler_enabled
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


def end_with(
    event: record_function, future: torch.futures.Future[Any]
) -> torch.futures.Future[Any]:
    """Ends ``event`` with ``future``; returns a future of the same, done after the event."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    event._call_end_callbacks_on_future(ended)
    result: torch.futures.Future[Any] = torch.futures.Future()

    def pass_on(done: torch.futures.Future[Any]) -> None:
        ended.set_result(None)
        try:
            result.set_result(torch.futures.Future.wait(done))
        except Exception as error:
            fail(result, error)

    future.add_done_callback(pass_on)
    return result


_ask_type = RRef._ask_type


def ask_type(reference: RRef[Any], timeout: float) -> torch.futures.Future[Any]:
    """Does as ``RRef._ask_type``, with an event where a profiler runs."""
    if not is_enabled():
        return _ask_type(reference, timeout)
    here = torchweft.rpc.get_worker_info().name
    key = build_key(RPCExecMode.ASYNC, "_rref_typeof_on_owner", here, reference.owner_name())
    with record_function(key) as event:
        return end_with(event, _ask_type(reference, timeout))


def install() -> None:
    """Adds the names of events to ``torchweft.compat.rpc.internal``, and an event to references."""
    vars(internal).update(RPCExecMode=RPCExecMode, _build_rpc_profiling_key=build_key)
    RRef._ask_type = ask_type  # type: ignore[method-assign]
