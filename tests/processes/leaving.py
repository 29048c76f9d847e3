"""Functions for workers that are shut down while other workers misbehave."""

from __future__ import annotations

import threading
import time

from tests.contract.processes.functions import add, identity, wait_until
from torchweft import rpc
from torchweft.engine.protocol.leaving import Leader
from torchweft.rpc import node
from torchweft.rpc.node import current_node

NAMES = "abc"
END_LIMIT_S = 0.5
"""How long a hindered worker waits at its end; the default is longer."""

_endless = threading.Event()
_called: list[object] = []


def join(name: str, path: str, size: int | None) -> None:
    node.END_LIMIT_S = END_LIMIT_S
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", rpc_timeout=20.0)
    rpc.init_rpc(name, rank=NAMES.index(name), world_size=size, rpc_backend_options=options)


def greet_all() -> None:
    """Calls every worker, so that there are connections."""
    for info in rpc.get_worker_infos():
        assert rpc.rpc_sync(info, add, args=(1, 1)) == 2


def wait_for_ever() -> None:
    _endless.wait()


def call_for_ever(to: str) -> None:
    _called.append(rpc.rpc_async(to, wait_for_ever, timeout=0))
    assert rpc.rpc_sync(to, add, args=(1, 1)) == 2  # The first call has begun.


def send_much(to: str) -> None:
    """Sends more than the buffers on the way to a worker that does not read can hold."""
    for _ in range(3):
        _called.append(rpc.rpc_async(to, identity, args=("x" * (16 << 20),), timeout=0))


def shut_down(limit_s: float) -> tuple[float, Exception | None]:
    """Shuts down; returns how many seconds that took, and the error, if any."""
    begin_s = time.monotonic()
    problem: Exception | None = None
    try:
        rpc.shutdown(timeout=limit_s)
    except Exception as error:
        problem = error
    return time.monotonic() - begin_s, problem


def leave_at_once() -> tuple[float, Exception | None]:
    begin_s = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - begin_s, None


def names_here() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def await_ready(count: int) -> None:
    """Waits until the leader knows that ``count`` workers have called ``shutdown``."""
    leader = current_node().leaving._machine
    assert isinstance(leader, Leader)
    wait_until(lambda: len(leader._ready) == count, lambda: f"only {leader._ready} have")
