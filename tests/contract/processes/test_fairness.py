"""No caller crowds out other callers: slow functions, a flood of calls, full queues."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.functions import WORKER_THREADS, options, wait_until
from torchweft import rpc
from torchweft.errors import CallRefused, QueueFull
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")
LIMIT = 500

served: list[str] = []


def serve(caller: str, seconds: float = 0.0) -> int:
    """Notes who called, and returns how many calls came before."""
    served.append(caller)
    if seconds:
        time.sleep(seconds)
    return len(served) - 1


def serve_tensor(caller: str, tensor: torch.Tensor) -> float:
    serve(caller)
    return float(tensor.sum())


def hold(gate: str) -> None:
    """Keeps a thread of the worker until the gate opens."""
    with open(gate, "rb"):
        pass


def forget() -> None:
    served.clear()


def count_served() -> int:
    return len(served)


def flood(callee: str, calls: int, seconds: float) -> int:
    """Makes many calls at once; returns how many calls were served before the last of them."""
    futures = [rpc.rpc_async(callee, serve, args=("flood", seconds)) for _ in range(calls)]
    return max(future.wait() for future in futures)


@pytest.fixture(scope="module")
def bounded(nursery: Nursery) -> Iterator[Cluster]:
    """Workers that queue few calls of each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_QUEUE_LIMIT_CALLS", str(LIMIT))
        patch.setenv("WEFT_QUEUE_LIMIT_BYTES", str(1 << 20))
        with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
            yield group


@pytest.fixture(autouse=True)
def fresh(bounded: Cluster) -> None:
    rpc.rpc_sync("worker1", forget)


class Held:
    """Keeps all threads of a worker busy until ``let_go``."""

    def __init__(self, folder: Path) -> None:
        self._gates = [folder / f"gate{number}" for number in range(WORKER_THREADS)]
        for gate in self._gates:
            os.mkfifo(gate)
        self._calls = [rpc.rpc_async("worker1", hold, args=(str(gate),)) for gate in self._gates]

    def let_go(self) -> None:
        for gate in self._gates:
            gate.write_bytes(b"")  # It blocks until the other end is opened.
        for call in self._calls:
            call.wait()


def test_a_single_call_is_served_in_the_middle_of_a_flood() -> None:
    calls = 400
    last = rpc.rpc_async("worker0", flood, args=("worker1", calls, 0.005))
    wait_until(lambda: rpc.rpc_sync("worker1", count_served) > 0, lambda: "the flood never came")
    before = rpc.rpc_sync("worker1", count_served)
    place = rpc.rpc_sync("worker1", serve, args=("single",))
    assert place - before < calls // 4
    assert last.wait() >= calls - 1


def test_a_slow_function_does_not_hold_up_others_of_its_caller(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = rpc.rpc_async("worker1", hold, args=(str(gate),))
    for _ in range(20):
        rpc.rpc_sync("worker1", serve, args=("quick",))
    assert not slow.done()
    gate.write_bytes(b"")
    slow.wait()


def test_what_waits_beyond_the_limit_is_refused_and_nothing_else(tmp_path: Path) -> None:
    held = Held(tmp_path)
    calls = [rpc.rpc_async("worker1", serve, args=("driver",)) for _ in range(3 * LIMIT)]
    # Another worker finds room.
    other = rpc.rpc_async("worker0", flood, args=("worker1", LIMIT // 2, 0.0))
    wait_until(lambda: any(call.done() for call in calls), lambda: "no call was refused")
    first = next(call for call in calls if call.done())
    with pytest.raises(QueueFull, match=r"worker 'worker1' has too many calls of worker 'driver'"):
        first.wait()
    assert not all(call.done() for call in calls)
    held.let_go()
    outcomes = [outcome_of(call) for call in calls]
    assert LIMIT - WORKER_THREADS <= outcomes.count("served") < len(calls)
    assert other.wait() > 0


def outcome_of(call: Any) -> str:
    try:
        call.wait()
    except CallRefused:
        return "refused"
    return "served"


def test_references_that_a_refused_call_was_to_make_raise_it(tmp_path: Path) -> None:
    held = Held(tmp_path)
    references = [rpc.remote("worker1", serve, args=("driver",)) for _ in range(3 * LIMIT)]
    held.let_go()
    outcomes: list[int | None] = []
    for reference in references:
        try:
            outcomes.append(reference.to_here())
        except QueueFull:
            outcomes.append(None)
    assert 0 < outcomes.count(None) <= 2 * LIMIT + WORKER_THREADS


def test_the_bytes_that_wait_are_bounded_too(tmp_path: Path) -> None:
    held = Held(tmp_path)
    tensor = torch.ones(60 * 256)  # 60 KiB, which travel inside the message
    calls = [rpc.rpc_async("worker1", serve_tensor, args=("d", tensor)) for _ in range(100)]
    held.let_go()
    outcomes = [outcome_of(call) for call in calls]
    assert 0 < outcomes.count("refused") < len(outcomes)
