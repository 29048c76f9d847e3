"""Large tensors in flight when a worker is lost, or cannot be reached by data connections."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest

import torchweft
from tests.contract.processes.functions import options, stop, wait_until
from tests.processes import internals
from tests.processes.streams import (
    SETTINGS,
    arrivals_from,
    connect_data,
    connections_with,
    count_elements,
    data_threads,
    ones,
    outbox_to,
)
from torchweft import rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Nursery

LARGE_BYTES = 512 << 20


@pytest.fixture(autouse=True)
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


def test_a_receiver_that_is_killed_frees_the_sender(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=1, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        connect_data("worker0")
        outbox = outbox_to("worker0")
        stop(group.pids["worker0"])
        try:
            future = rpc.rpc_async("worker0", count_elements, args=(ones(LARGE_BYTES),))
            assert not outbox.is_empty
        finally:
            os.kill(group.pids["worker0"], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="worker0"):
            future.wait()
        wait_until(lambda: outbox.is_empty, lambda: "what a lost worker was to get is kept")
        assert connections_with("worker0")[1] == 0
    assert data_threads() == []


def test_a_sender_that_is_killed_ends_the_wait(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=1, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        connect_data("worker0")
        arrivals = arrivals_from("worker0")
        before, had_bytes = internals.pool_statistics().leased_bytes, arrivals.bytes_received
        future = rpc.rpc_async("worker0", ones, args=(LARGE_BYTES,))
        wait_until(lambda: arrivals.bytes_received > had_bytes, lambda: "nothing came")
        os.kill(group.pids["worker0"], signal.SIGKILL)
        assert arrivals.bytes_received < had_bytes + LARGE_BYTES, (
            "all of it came: nothing was tested"
        )
        start_s = time.monotonic()
        with pytest.raises(WorkerLost, match="worker0"):
            future.wait()
        assert time.monotonic() - start_s < 5.0
        del future
        wait_until(
            lambda: gc.collect() >= 0 and internals.pool_statistics().leased_bytes == before,
            lambda: "the memory of a tensor that will never be complete is kept",
        )
