"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.processes.test_launch_cluster import (
    LIMIT_S,
    PROMPT_S,
    are_gone,
    compute_for_ever,
    identify,
    wait_until,
)
from torchweft import rpc, secret
from torchweft.engine.worker.current import current
from torchweft.errors import LaunchError, ShutdownError, WorkerLost
from torchweft.launch import Cluster, Nursery, cluster, clusters
from torchweft.launch.job import program_job
from torchweft.launch.supervisor import Supervisor
from torchweft.rpc import node
from torchweft.secret import Secret


def test_process_ids_are_known_even_if_they_are_told_after_a_worker_has_joined(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_joined = threading.Event()
    join, read_events = Cluster._join, Supervisor._receive

    def joined(group: Cluster) -> None:
        join(group)
        assert group.pids == {}
        has_joined.set()

    def late(supervisor: Supervisor) -> None:
        has_joined.wait(LIMIT_S)
        time.sleep(0.1)  # Longer than the step from there to the end of the start.
        read_events(supervisor)

    monkeypatch.setattr(Cluster, "_join", joined)
    monkeypatch.setattr(Supervisor, "_receive", late)
    with cluster(workers=1, nursery=nursery) as group:
        pid = group.pids["worker0"]
        assert rpc.rpc_sync("worker0", identify) == ("worker0", 1, pid)


def test_a_nursery_that_tells_no_process_id_is_an_error(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    read_events = Supervisor._receive

    def late(supervisor: Supervisor) -> None:
        is_over.wait(LIMIT_S)
        read_events(supervisor)

    def abandoned(group: Cluster) -> None:
        is_over.set()
        abandon(group)

    abandon = Cluster.abandon
    monkeypatch.setattr(Supervisor, "_receive", late)
    monkeypatch.setattr(Cluster, "abandon", abandoned)
    monkeypatch.setattr(clusters, "PIDS_S", 0.1)
    with pytest.raises(LaunchError, match=r"'worker0' has joined, .* process id within 0.1 s"):
        cluster(workers=1, nursery=nursery).start()


def hold_the_interpreter(path: str) -> None:
    """Creates a file, then holds the interpreter lock, so that no other thread runs."""
    library = ctypes.PyDLL(None)
    library.creat(path.encode(), 0o600)
    library.pause()


def end_never() -> None:
    atexit.register(threading.Event().wait)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "SAY_S", 0.3)


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.usefixtures("_impatient")
def test_what_is_stuck_is_named_with_its_stack_and_killed(
    nursery: Nursery, capsys: pytest.CaptureFixture[str], restarts: int
) -> None:
    terms: Any = {"nursery": nursery, "restarts": restarts}
    group = cluster(workers=2, leave_timeout=1.0, **terms).start()
    pids = list(group.pids.values())
    rpc.rpc_async("worker1", compute_for_ever, timeout=0)
    start_s = time.monotonic()
    with pytest.raises(ShutdownError, match=r"not be left within 1 s: worker 'worker1' runs "):
        group.close()
    assert time.monotonic() - start_s < 1.0 + PROMPT_S
    assert are_gone(pids)
    told = capsys.readouterr().err
    function = f"{compute_for_ever.__module__}.compute_for_ever"
    runs = f"worker 'worker1' runs {function}, called by 'driver', since "
    assert f" s: {runs}" in told.splitlines()[0]
    assert told.splitlines()[0].startswith("weft: still leaving the cluster after ")
    assert "in compute_for_ever\n" in told
    assert "Traceback" not in told


@pytest.mark.usefixtures("_impatient")
def test_a_worker_that_cannot_say_what_it_does_is_named_too(
    nursery: Nursery,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "ANSWER_S", 0.5)
    begun = tmp_path / "begun"
    group = cluster(workers=2, leave_timeout=0.5, nursery=nursery).start()
    rpc.rpc_async("worker0", hold_the_interpreter, args=(str(begun),), timeout=0)
    wait_until(begun.exists)
    with pytest.raises(ShutdownError, match=r"'worker0' does not say what it is doing") as caught:
        group.close()
    assert caught.value.missing == ("worker0",)
    assert "in hold_the_interpreter\n" in capsys.readouterr().err


@pytest.mark.usefixtures("_impatient")
def test_a_worker_whose_process_does_not_end_is_named(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(LaunchError, match=r"'worker1' did not end within 1 s of the shutdown"),
        cluster(workers=2, leave_timeout=1.0, nursery=nursery),
    ):
        rpc.rpc_sync("worker1", end_never)
    told = capsys.readouterr().err
    assert "'worker1' has left the group, but its process has not ended\n" in told
    assert "in _end_at_once\n" in told


def multiply_for_ever() -> None:
    """Is within C++ most of the time, without the lock of the interpreter."""
    matrix = torch.ones(300, 300)
    while True:
        torch.mm(matrix, matrix)


def leave_soon() -> None:
    """Has the worker not wait for functions that run."""
    node.END_LIMIT_S = 0.0


def test_a_worker_that_is_interrupted_in_a_function_ends_by_that_signal(
    nursery: Nursery, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "NOTICE_S", LIMIT_S)  # The wait ends when its exit is seen.
    group = cluster(workers=1, nursery=nursery, setup=leave_soon).start()
    call = rpc.rpc_async("worker0", multiply_for_ever)
    time.sleep(0.1)
    os.kill(group.pids["worker0"], signal.SIGINT)
    with pytest.raises(WorkerLost):
        call.wait()
    with pytest.raises(LaunchError, match=r"'worker0'.* was killed by SIGINT"):
        group.close()
    assert "terminate called" not in capsys.readouterr().err


def test_a_worker_that_never_joins_fails_the_start(
    nursery: Nursery, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = program_job([sys.executable, "-c", "raise SystemExit('no licence')"])
    monkeypatch.setattr(clusters, "serve_job", lambda *args, **options: broken)
    start_s = time.monotonic()
    group = cluster(workers=1, nursery=nursery)
    with pytest.raises(LaunchError, match=r"'worker0'.* ended with exit code 1"):
        group.start()
    assert time.monotonic() - start_s < LIMIT_S
    assert "its last lines:\n    no licence\n" in capsys.readouterr().err
    assert group.pids == {}


@pytest.mark.keeps("processes")
@pytest.mark.parametrize(("is_told", "restarts"), [(True, 0), (False, 1)])
def test_a_cluster_where_a_secret_is_set(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool, restarts: int
) -> None:
    path = tmp_path / "secret"
    secret.write_new(path)
    options = None
    if is_told:
        options = rpc.RpcBackendOptions(secret=Secret.from_file(path), listen="192.0.2.1")
    else:
        monkeypatch.setenv("WEFT_SECRET_FILE", str(path))
        monkeypatch.setenv("WEFT_LISTEN", "192.0.2.1")
    with cluster(1, nursery=nursery, rpc_backend_options=options, restarts=restarts):
        assert rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 1)).item() == 2.0
        listeners = [*current().me.registration.addresses]
        listeners += current().find("worker0").registration.addresses
        assert all(each.startswith(("unix:@", "tcp:127.0.0.1:")) for each in listeners)
