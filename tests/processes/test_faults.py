"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import time

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options, raised_by, wait_until
from tests.contract.processes.test_faults import kill
from tests.processes import internals
from torchweft import rpc
from torchweft.errors import LaunchError, OwnerLost, ShutdownError, WorkerLost
from torchweft.launch import Nursery

NOTICE_S = 2.0
"""On a busy machine; usually some 20 ms, and 10 s where only silence tells of a loss."""

LARGE_BYTES = 3 << 20


def test_a_killed_worker_is_noticed_at_once(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with torchweft.cluster(
        workers=3, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        gate = functions.pass_gate
        call = rpc.rpc_async("worker1", gate, args=("never",))
        sent = torch.ones(LARGE_BYTES)
        sending = rpc.rpc_async("worker1", functions.add, args=(sent, 1))
        lost = rpc.remote("worker1", gate, args=("never",))
        kept = rpc.remote("worker0", functions.Tracked, args=(3,))
        rpc.rpc_sync("worker1", functions.keep, args=("kept", kept))
        fetch = rpc.rpc_async("worker0", functions.fetch_content, args=(lost,))
        sending.wait()
        wait_until(
            lambda: rpc.rpc_sync("worker1", internals.count_at_gate, args=("never",)) == 2,
            lambda: "the calls did not arrive",
        )

        kill(group.pids["worker1"])
        start_s = time.monotonic()
        error = raised_by(call.wait)
        assert time.monotonic() - start_s < NOTICE_S
        assert isinstance(error, WorkerLost)
        assert error.worker == "worker1"
        assert "worker 'worker1' (rank 2) is lost" in str(error)
        assert isinstance(error, ConnectionError)

        for wait in (lost.to_here, fetch.wait):
            owner_lost = raised_by(wait)
            assert isinstance(owner_lost, OwnerLost)
            assert owner_lost.worker == "worker1"
        assert time.monotonic() - start_s < 2 * NOTICE_S
        for again in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            later = raised_by(lambda again=again: again("worker1", len))
            assert isinstance(later, WorkerLost)
            assert later.__cause__ is later.__context__ is None  # No frames of Weft are shown.
        assert isinstance(raised_by(lost.rpc_sync().anything), WorkerLost)

        assert internals.held_for("worker1") == (0, 0)
        assert rpc.rpc_sync("worker0", functions.bounce, args=(9, ["worker0", "worker2"])) == 9
        assert kept.to_here().content == 3
        del kept
        wait_until(
            lambda: rpc.rpc_sync("worker0", functions.count_tracked) == 0,
            lambda: "what only the lost worker held lives on",
        )
        capsys.readouterr()


def test_a_worker_that_dies_during_the_shutdown(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    start_s = 0.0
    with pytest.raises((ShutdownError, LaunchError), match="worker1"):  # noqa: PT012, SIM117
        with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()):
            reference = rpc.remote("worker1", functions.Tracked)
            rpc.rpc_sync("worker0", functions.keep, args=("kept", reference))
            rpc.rpc_sync("worker1", internals.die_when_settling)
            start_s = time.monotonic()
    assert time.monotonic() - start_s < 3.0
    capsys.readouterr()


def test_pulling_that_fails_at_run_time_is_replaced_by_a_stream(
    nursery: Nursery, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()):
        for name, peer in [("driver", "worker0"), ("worker0", "driver"), ("worker1", "worker0")]:
            rpc.rpc_sync(name, functions.name_here)
            rpc.rpc_sync(name, rpc.rpc_sync, args=(peer, functions.name_here))
            rpc.rpc_sync(name, internals.forbid, args=(peer, "shm", "striped"))
        if internals.channel_to("worker0") != "cma":
            pytest.skip("no process may read another's memory here")
        rpc.rpc_sync("worker0", internals.break_pulling)
        sent = internals.make_tensor(LARGE_BYTES)
        calls = [
            rpc.rpc_async("worker0", functions.identity, args=([sent + number, number, sent],))
            for number in range(6)
        ]
        for number, (first, same, third) in enumerate(torch.futures.wait_all(calls)):
            assert same == number
            assert torch.equal(first, sent + number)
            assert torch.equal(third, sent)
        assert internals.channel_to("worker0") == "stream"
        assert rpc.rpc_sync("worker0", internals.channel_to, args=("driver",)) == "cma"
        # A tensor that a worker cannot pull may also be the result of its own call.
        path = ["worker1", "worker0", "worker1"]
        assert torch.equal(functions.call_through(path, functions.identity, (sent,)), sent)
        assert internals.held_for("worker0") == (0, 0)
    warnings = [text for text in caplog.messages if "no longer travel by cma" in text]
    assert len(warnings) == 1
    assert "'worker0'" in warnings[0]
    assert "stream" in warnings[0]
    assert capsys.readouterr().err.count("no longer travel by cma") == 1  # logged by worker1
