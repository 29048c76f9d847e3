"""The work of a large group: the first worker calls all others in turn."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from benchmarks.frame.api import Api
from benchmarks.scale.processes import cpu_s


def echo(value: object) -> object:
    """Returns its argument; it does no work, so only the call is measured."""
    return value


def call_in_turn(api: Api, calls: int) -> dict[str, Any]:
    """Calls every other worker once to connect, then makes at least ``calls`` calls in turns."""
    tensor = torch.ones(2)
    rpc = api.rpc
    for peer in api.peers:
        rpc.rpc_sync(peer, echo, args=(tensor,))
    seconds = []
    cpu_before = cpu_s([os.getpid()])
    for _ in range(-(-calls // len(api.peers))):
        for peer in api.peers:
            begin = time.perf_counter_ns()
            rpc.rpc_sync(peer, echo, args=(tensor,))
            seconds.append((time.perf_counter_ns() - begin) / 1e9)
    return {"values": seconds, "cpu_s": (cpu_s([os.getpid()]) - cpu_before) / len(seconds)}
