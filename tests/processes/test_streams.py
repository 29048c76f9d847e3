"""Large tensors over data connections, between workers that share no memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options, wait_until
from tests.processes import internals
from tests.processes.streams import (
    FROM,
    SETTINGS,
    STRIPE,
    arrivals_from,
    bytes_of,
    connect_data,
    connections_with,
    count_elements,
    data_threads,
    ones,
    outbox_to,
    transfers_from,
    way_to,
)
from torchweft import knobs, rpc
from torchweft.engine.worker.current import current
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")

LARGE_BYTES = 256 << 20
SIZES = [FROM - 1, FROM, 2 * STRIPE + 1, (16 << 20) + 3]


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
            yield group


# Tensors of every size, in every direction


@pytest.mark.parametrize("size_bytes", SIZES)
def test_sizes_around_every_limit(group: Cluster, size_bytes: int) -> None:
    sent = bytes_of(size_bytes)
    there_and_back = functions.call_through(["worker0", "worker1"], functions.identity, (sent,))
    assert torch.equal(there_and_back, sent)
    fetched = rpc.remote("worker1", internals.make_tensor, args=(size_bytes,)).to_here()
    assert torch.equal(fetched, sent)


def test_it_is_this_way_that_they_take(group: Cluster) -> None:
    connect_data("worker0")
    assert way_to("worker0", FROM) == "striped"
    assert way_to("worker0", FROM - 1) == "stream"
    count = knobs.STRIPE_CONNECTIONS.default
    assert connections_with("worker0") == (count, count)
    assert rpc.rpc_sync("worker0", connections_with, args=("driver",)) == (count, count)


def test_many_threads_send_at_once(group: Cluster) -> None:
    def send(number: int) -> bool:
        sent = bytes_of(FROM * (1 + number % 5) + number) + number
        names = ["worker0", "worker1"] if number % 2 else ["worker1", "worker0"]
        return torch.equal(functions.call_through(names, functions.identity, (sent,)), sent)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(send, range(40)))
    assert len(data_threads()) <= knobs.STRIPE_THREADS.default
    for name in group.names:
        assert len(rpc.rpc_sync(name, data_threads)) <= knobs.STRIPE_THREADS.default


def test_memory_returns_on_both_sides(group: Cluster) -> None:
    gc.collect()
    before = internals.pool_statistics()
    received = [rpc.rpc_sync("worker0", internals.make_tensor, args=(FROM,)) for _ in range(3)]
    assert internals.pool_statistics().leased_bytes >= before.leased_bytes + 3 * FROM
    received.clear()
    assert internals.pool_statistics().leased_bytes == before.leased_bytes
    assert transfers_from("worker0") == 0
    wait_until(lambda: outbox_to("worker0").is_empty, lambda: "something is not written yet")
    assert rpc.rpc_sync("worker0", transfers_from, args=("driver",)) == 0


def test_an_answer_that_comes_too_late_is_dropped(group: Cluster) -> None:
    connect_data("worker0")
    gc.collect()
    before = internals.pool_statistics().leased_bytes
    future = rpc.rpc_async("worker0", functions.pass_gate, args=("late", bytes_of(8 * FROM)))
    # The caller abandons the call, but the callee does not learn of that in time.
    calls = current().calls
    assert calls._client._taken(future._call) == [future._call]
    calls.fail(future._call, CallTimeout("given up"))
    with pytest.raises(CallTimeout):
        future.wait()
    received = arrivals_from("worker0").bytes_received
    rpc.rpc_sync("worker0", functions.open_gate, args=("late",))
    wait_until(
        lambda: (
            arrivals_from("worker0").bytes_received >= received + 8 * FROM
            and transfers_from("worker0") == 0
            and internals.pool_statistics().leased_bytes == before
        ),
        lambda: f"{transfers_from('worker0')} transfers that nobody wants are kept",
    )


# Small calls behind a large tensor


def test_small_calls_do_not_wait_for_a_large_tensor(group: Cluster) -> None:
    connect_data("worker0")
    sent = ones(LARGE_BYTES)
    rpc.rpc_sync("worker0", count_elements, args=(sent,))  # memory is warm from here on
    quiet_s = statistics.median(latencies(lambda: False, at_most=50))
    start_s = time.monotonic()
    in_flight = rpc.rpc_async("worker0", count_elements, args=(sent,))
    busy = latencies(in_flight.done, at_most=10_000)
    flight_s = time.monotonic() - start_s
    assert in_flight.wait() == LARGE_BYTES
    # If calls queued behind the tensor, only one call would run while it is in flight.
    assert len(busy) >= 5
    assert statistics.median(busy) < max(flight_s / 5, 20 * quiet_s)


def latencies(is_over: Callable[[], bool], at_most: int) -> list[float]:
    measured: list[float] = []
    while len(measured) < at_most and not is_over():
        start_s = time.perf_counter()
        rpc.rpc_sync("worker0", functions.name_here)
        measured.append(time.perf_counter() - start_s)
    return measured


def test_a_second_tensor_does_not_wait_for_the_first(group: Cluster) -> None:
    connect_data("worker0")
    large = ones(LARGE_BYTES)
    ended: list[str] = []
    first = rpc.rpc_async("worker0", count_elements, args=(large,))
    first = first.then(lambda done: ended.append("first"))
    second = rpc.rpc_async("worker0", count_elements, args=(bytes_of(4 * FROM),))
    second.then(lambda done: ended.append("second")).wait()
    first.wait()
    assert ended == ["second", "first"]
