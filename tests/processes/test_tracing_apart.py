"""Traces of strict workers, and of groups that lose a worker meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import torchweft
from tests.contract.processes.functions import options, wait_until
from tests.processes.test_tracing import double, is_plain
from tests.trace_reader import read_trace
from torchweft import rpc
from torchweft.errors import ObserveError
from torchweft.launch import Nursery
from torchweft.observe.tracing import recorder
from torchweft.observe.tracing.recorder import RECORDER
from torchweft.observe.tracing.session import Trace


def test_strict_workers_are_traced(nursery: Nursery, tmp_path: Path) -> None:
    strict = options(strict=True, callables=[double])
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=strict):
        with Trace(tmp_path / "trace.json") as trace:
            rpc.rpc_sync("worker0", double, args=(2,))
        with pytest.raises(ObserveError, match="does not record this trace"):
            rpc.rpc_sync("worker0", recorder.take, args=(5,))
        with pytest.raises(TypeError, match="trace"):
            rpc.rpc_sync("worker0", recorder.end, args=("5",))
    assert trace.missing == {}
    (run,) = read_trace(tmp_path / "trace.json").of("run")
    assert run["name"] == f"{double.__module__}.double"


def lead_and_stay(path: Path) -> None:
    """Begins a trace, and does not end it."""
    Trace(path, timeout=5.0).__enter__()


def test_noting_ends_with_the_worker_that_leads(nursery: Nursery, tmp_path: Path) -> None:
    with (
        torchweft.cluster(
            workers=2, nursery=nursery, rpc_backend_options=options(), check=False
        ) as group,
    ):
        rpc.rpc_sync("worker0", lead_and_stay, args=(tmp_path / "trace.json",))
        assert RECORDER.get().is_on
        os.kill(group.pids["worker0"], signal.SIGKILL)
        wait_until(is_plain, lambda: "the driver still records")
        wait_until(lambda: rpc.rpc_sync("worker1", is_plain), lambda: "worker1 still records")


def test_a_worker_that_dies_is_named_and_the_others_are_written(
    nursery: Nursery, tmp_path: Path
) -> None:
    with (
        torchweft.cluster(
            workers=2, nursery=nursery, rpc_backend_options=options(), check=False
        ) as group,
    ):
        with Trace(tmp_path / "trace.json", timeout=5.0) as trace:
            rpc.rpc_sync("worker1", double, args=(1,))
            rpc.rpc_sync("worker0", double, args=(1,))
            os.kill(group.pids["worker0"], signal.SIGKILL)
        assert list(trace.missing) == ["worker0"]
        assert "WorkerLost" in trace.missing["worker0"]
        found = read_trace(tmp_path / "trace.json")
        assert len(found.of("call")) == 2
        assert [found.worker_of(each) for each in found.of("run")] == ["worker1"]
