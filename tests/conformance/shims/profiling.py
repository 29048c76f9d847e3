"""The event of a type query in the legacy profiler, which records no other call."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

import torchweft.rpc
from torchweft.compat.rpc.references import RRef, end_with
from torchweft.rpc.calls import RPCExecMode, build_key

_ask_type = RRef._ask_type


def ask_type(reference: RRef[Any], timeout: float) -> torch.futures.Future[Any]:
    """Does as ``RRef._ask_type``, with an event if the legacy profiler runs."""
    is_legacy = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    if not is_legacy or profiler._is_profiler_enabled:
        return _ask_type(reference, timeout)
    here = torchweft.rpc.get_worker_info().name
    key = build_key(RPCExecMode.ASYNC, "_rref_typeof_on_owner", here, reference.owner_name())
    with record_function(key) as event:
        return end_with(event, _ask_type(reference, timeout))


def install() -> None:
    """Adds the event to references."""
    RRef._ask_type = ask_type  # type: ignore[method-assign]
