"""Records calls as events of PyTorch's profilers, named as PyTorch names them.

An event belongs to the caller: only a profiler on the callee records what the callee does
meanwhile. The event of ``rpc_sync`` and ``rpc_async`` lasts until the call has ended; that of
``remote``, until the call was sent, since no answer is awaited. A class of references may watch the
making of the value, and end the event then (``Handle.end_event``).

A call looks at ``torch.autograd.profiler._is_profiler_enabled``, which is True during a profile of
this or any other thread: that is one look at a variable, and no function.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.autograd.profiler import record_function

from torchweft.serialize.functions import text_of
from torchweft.worker.calls import PendingCall
from torchweft.worker.peers import Peer

TO_HERE = "to_here"
"""The use of a reference that PyTorch names without a way of the call."""


class RPCExecMode(enum.Enum):
    """The ways to make a call."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


def build_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name of a call's event."""
    if func_name == TO_HERE:
        return f"{TO_HERE}#({current_worker_name})->({dst_worker_name})"
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def begin(mode: RPCExecMode, here: str, peer: Peer, function: Any) -> record_function | None:
    """Begins the event of a call that worker ``here`` makes.

    Args:
        mode: The way of the call.
        here: Name of this worker.
        peer: The callee.
        function: The function, its name, or the subject of the call. A function with the
            attribute ``has_no_event`` is a step of another call, and gets no event.
    """
    if isinstance(function, tuple):
        function = function[-1]
    elif getattr(function, "has_no_event", False):
        return None
    event = record_function(build_key(mode, name_of(function), here, peer.name))
    event.__enter__()  # type: ignore[no-untyped-call]
    return event


def end(event: record_function) -> None:
    """Ends an event of this thread."""
    event.__exit__(None, None, None)


def end_with_call(event: record_function, call: PendingCall) -> None:
    """Ends an event when a call ends, before its future is seen to be done."""
    complete = call.on_done
    assert complete is not None  # set by its future
    ended: torch.futures.Future[None] = torch.futures.Future()
    event._call_end_callbacks_on_future(ended)

    def end_and_complete(call: PendingCall) -> None:
        if not ended.done():
            ended.set_result(None)
        complete(call)

    call.on_done = end_and_complete


def name_of(function: Any) -> str:
    """Returns the name under which a profiler shows a function."""
    if isinstance(function, bytes):
        function = text_of(function).partition(":")[2]
    if isinstance(function, str):
        return function
    builtin = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if builtin is not None:
        return str(builtin)
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return str(getattr(function, "__qualname__", repr(function)))
