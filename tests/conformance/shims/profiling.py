"""Names of profiler events that only PyTorch's tests use, and the event of a type query."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.profiler import record_function

import torchweft.rpc
from torchweft.compat.rpc import internal
from torchweft.compat.rpc.profiling import RPCExecMode, build_key, end_with, is_enabled
from torchweft.compat.rpc.references import RRef

_ask_type = RRef._ask_type


def ask_type(reference: RRef[Any], timeout: float) -> torch.futures.Future[Any]:
    """Does as ``RRef._ask_type``, with an event if a profiler runs."""
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
