"""Counts the work of two workers for small calls and passes; ``test_counted_work.py`` starts them.

    python -m tests.processes.counting RANK FILE

Rank 0 calls and rank 1 serves. Rank 0 prints, as JSON, the work of each worker for a call of each
kind: Python functions called, C functions called, and how many of those are system calls. A profile
function counts them, so the counts are the same on every machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torchweft import rpc
from torchweft.agent.current import current
from torchweft.autograd import backward, context
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer
from torchweft.rpc.node import current_node
from torchweft.rpc.tracing import service

ROUNDS = 3
CALLS = 100
WARM_UP_CALLS = 100
SYSTEM_CALLS = {
    "epoll.modify",
    "epoll.poll",
    "eventfd_read",
    "eventfd_write",
    "socket.recv_into",
    "socket.recvmsg_into",
    "socket.send",
    "socket.sendmsg",
}

_counted: Counter[str] = Counter()


def _profile(frame: Any, event: str, argument: Any) -> None:
    if event == "call":
        _counted["functions"] += 1
    elif event == "c_call":
        _counted["functions in C"] += 1
        name = getattr(argument, "__qualname__", "")
        if name in SYSTEM_CALLS:
            _counted["system calls"] += 1
            _counted[name] += 1


def echo(value: object) -> object:
    return value


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def take() -> dict[str, int]:
    """Returns the counts of this worker since the last ``take``."""
    taken = dict(_counted)
    _counted.clear()
    return taken


def count_calls() -> None:
    """Has this worker count its calls, as if it was observed."""
    current_node().observed.counting.extend(3600.0)


def stop_counting() -> None:
    current_node().observed.counting.stop()


def trace_calls() -> None:
    """Has this worker record its calls, as in a trace."""
    stop_counting()
    service.begin(1, 10_000, profiles=False)


def kinds() -> dict[str, Callable[[], object]]:
    """Returns the calls that are counted."""
    one, sixteen = torch.ones(2), [torch.ones(2) for _ in range(16)]
    needs_grad = torch.ones(2, requires_grad=True)
    some_bytes, large = bytes(200 << 10), torch.ones(1 << 20)
    module = RemoteModule("callee", torch.nn.Linear, (2, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)

    def hop() -> None:
        with context() as context_id:
            backward(context_id, [rpc.rpc_sync("callee", double, args=(needs_grad,)).sum()])

    def training_step() -> None:
        with context() as context_id:
            backward(context_id, [module(one).sum()])
            optimizer.step(context_id)

    return {
        "nothing": lambda: rpc.rpc_sync("callee", echo, args=(None,)),
        "a lambda": lambda: rpc.rpc_sync("callee", lambda value: value, args=(None,)),
        "one tensor": lambda: rpc.rpc_sync("callee", echo, args=(one,)),
        "sixteen tensors": lambda: rpc.rpc_sync("callee", echo, args=(sixteen,)),
        "a tensor in a context": lambda: rpc.rpc_sync("callee", echo, args=(needs_grad,)),
        "200 KiB of bytes": lambda: rpc.rpc_sync("callee", echo, args=(some_bytes,)),
        "4 MiB": lambda: rpc.rpc_sync("callee", echo, args=(large,)),
        "a hop of backward": hop,
        "a training step": training_step,
    }


def count(call: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Makes a call repeatedly; returns the work of one call at the caller and the callee.

    On a busy machine, data sometimes arrives in more pieces. So each figure is the minimum of
    several rounds: the work that every call needs is in all of them.
    """
    for _ in range(WARM_UP_CALLS):
        call()
    rounds = [count_round(call) for _ in range(ROUNDS)]
    return {
        side: {name: min(found[side].get(name, 0.0) for found in rounds) for name in first}
        for side, first in rounds[0].items()
    }


def count_round(call: Callable[[], object]) -> dict[str, dict[str, float]]:
    rpc.rpc_sync("callee", take)
    before = socket_bytes()
    take()
    sys.setprofile(_profile)
    for _ in range(CALLS):
        call()
    sys.setprofile(None)
    here = take()
    here["bytes through sockets"] = socket_bytes() - before
    there = rpc.rpc_sync("callee", take)
    return {
        "caller": {name: number / CALLS for name, number in here.items()},
        "callee": {name: number / CALLS for name, number in there.items()},
    }


def socket_bytes() -> int:
    links = [peer.link for peer in current().peers.values() if peer.link is not None]
    return sum(link.bytes_sent + link.bytes_received for link in links)


def peak_bytes(call: Callable[[], object]) -> int:
    """Returns the peak of Python memory that one call takes here, the minimum of some rounds."""
    return min(_peak_once(call) for _ in range(ROUNDS))


def _peak_once(call: Callable[[], object]) -> int:
    call()
    gc.collect()
    tracemalloc.start()
    call()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - held


def main(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    if rank:
        threading.setprofile(_profile)
    options = rpc.RpcBackendOptions(init_method=f"file://{file}")
    name = ("caller", "callee")[rank]
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if not rank:
        gc.freeze()  # Each collection of ``peak_bytes`` would look at all of torch.
        report = {}
        for kind, call in kinds().items():
            with context() if "in a context" in kind else contextlib.nullcontext():
                counted: dict[str, Any] = count(call)
                counted["caller"]["bytes of Python"] = peak_bytes(call)
            report[kind] = counted
        for worker in ("caller", "callee"):
            rpc.rpc_sync(worker, count_calls)
        report["nothing, observed"] = count(kinds()["nothing"])
        for worker in ("callee", "caller"):
            rpc.rpc_sync(worker, trace_calls)
        report["nothing, traced"] = count(kinds()["nothing"])
        print(json.dumps(report), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
