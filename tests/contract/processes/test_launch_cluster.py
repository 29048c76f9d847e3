"""``torchweft.cluster``: worker processes around the test, forked from one warm process."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweft import rpc
from torchweft.agent import deaths
from torchweft.errors import ConfigurationError, LaunchError, ShutdownError, WorkerLost
from torchweft.launch import Cluster, Nursery, cluster, leave_watch, local_cluster
from torchweft.launch.job import program_job
from torchweft.launch.supervisor import Supervisor
from torchweft.rpc import node

PROMPT_S = 8.0
LIMIT_S = 20.0


def wait_until(is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not so within {limit_s} s"
        time.sleep(0.01)


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def identify() -> tuple[str, int, int]:
    me = rpc.get_worker_info()
    return me.name, me.id, os.getpid()


def call_back(driver: str) -> tuple[str, int, int]:
    answer: tuple[str, int, int] = rpc.rpc_sync(driver, identify)
    return answer


def say(text: str) -> None:
    print(text)
    print(text.upper(), file=sys.stderr)


def draw() -> tuple[float, float, float]:
    import random

    import numpy

    return random.random(), float(numpy.random.random()), float(torch.rand(()))


def test_caller_and_workers_call_each_other(nursery: Nursery) -> None:
    with cluster(workers=2, nursery=nursery) as group:
        assert group.names == ["worker0", "worker1"]
        for rank, name in enumerate(group.names, start=1):
            assert rpc.rpc_sync(name, identify) == (name, rank, group.pids[name])
        assert rpc.rpc_sync("worker1", call_back, args=("driver",)) == ("driver", 0, os.getpid())
        assert f"worker1 (pid {group.pids['worker1']})" in repr(group)
        pids = list(group.pids.values())
    assert are_gone(pids)
    assert repr(group) == "<Cluster of 2 workers, not running: worker0, worker1>"


def test_process_ids_are_known_even_if_they_are_told_after_a_worker_has_joined(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_joined = threading.Event()
    join, read_events = Cluster._join, Supervisor._read_events

    def joined(group: Cluster) -> None:
        join(group)
        assert group.pids == {}
        has_joined.set()

    def late(supervisor: Supervisor) -> None:
        has_joined.wait(LIMIT_S)
        time.sleep(0.1)  # Longer than the step from there to the end of the start.
        read_events(supervisor)

    monkeypatch.setattr(Cluster, "_join", joined)
    monkeypatch.setattr(Supervisor, "_read_events", late)
    with cluster(workers=1, nursery=nursery) as group:
        pid = group.pids["worker0"]
        assert rpc.rpc_sync("worker0", identify) == ("worker0", 1, pid)


def test_the_program_may_leave_by_shutdown(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    left = cluster(workers=1, nursery=nursery).start()
    rpc.shutdown()
    wait_until(lambda: "ended" in repr(left))
    with cluster(workers=1, nursery=nursery):
        assert "not running" in repr(left)
        left.close()
        assert rpc.rpc_sync("worker0", identify)[0] == "worker0"
        rpc.shutdown()
    assert capsys.readouterr().err == ""


def test_a_nursery_that_tells_no_process_id_is_an_error(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    read_events = Supervisor._read_events

    def late(supervisor: Supervisor) -> None:
        is_over.wait(LIMIT_S)
        read_events(supervisor)

    def abandoned(group: Cluster) -> None:
        is_over.set()
        abandon(group)

    abandon = Cluster.abandon
    monkeypatch.setattr(Supervisor, "_read_events", late)
    monkeypatch.setattr(Cluster, "abandon", abandoned)
    monkeypatch.setattr(local_cluster, "PIDS_S", 0.1)
    with pytest.raises(LaunchError, match=r"'worker0' has joined, .* process id within 0.1 s"):
        cluster(workers=1, nursery=nursery).start()


def test_one_cluster_after_the_other(nursery: Nursery) -> None:
    group = cluster(names=["ps", "trainer"], name="me", nursery=nursery)
    for _ in range(2):
        with group:
            assert rpc.rpc_sync("trainer", call_back, args=("me",))[0] == "me"


def test_workers_draw_different_numbers(nursery: Nursery) -> None:
    drawn = []
    for _ in range(2):
        with cluster(workers=2, nursery=nursery):
            drawn += [rpc.rpc_sync(f"worker{rank}", draw) for rank in (0, 1)]
            threads = rpc.rpc_sync("worker1", torch.get_num_threads)
    assert len({number for numbers in drawn for number in numbers}) == 12
    assert threads == int(os.environ["OMP_NUM_THREADS"])


def test_output_appears_behind_the_workers_name(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(workers=2, nursery=nursery):
        rpc.rpc_sync("worker1", say, args=("hello",))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("[worker1] hello\n", "[worker1] HELLO\n")


def test_an_exception_in_the_block_is_seen_at_once(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    start_s = pids = None
    try:
        with cluster(workers=2, nursery=nursery) as group:
            rpc.rpc_async("worker0", time.sleep, args=(60,))
            pids = list(group.pids.values())
            start_s = time.monotonic()
            raise ZeroDivisionError
    except ZeroDivisionError:
        end_s = time.monotonic()
    assert start_s is not None
    assert pids is not None
    assert end_s - start_s < PROMPT_S
    assert are_gone(pids)
    assert capsys.readouterr().err == ""


def compute_for_ever() -> None:
    while True:
        sum(range(1000))


def hold_the_interpreter(path: str) -> None:
    """Creates a file, then holds the interpreter lock, so that no other thread runs."""
    library = ctypes.PyDLL(None)
    library.creat(path.encode(), 0o600)
    library.pause()


def end_never() -> None:
    atexit.register(threading.Event().wait)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave_watch, "SAY_S", 0.3)


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
    runs = f"worker 'worker1' runs {__name__}.compute_for_ever, called by 'driver', since "
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
    monkeypatch.setattr(leave_watch, "ANSWER_S", 0.5)
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


def log(text: str) -> None:
    logging.getLogger("of.worker").info(text)


def test_workers_log_as_the_caller_does(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler()
    form = "%(levelname)s of %(name)s in %(weft_worker)s for %(weft_call)s: %(message)s"
    handler.setFormatter(logging.Formatter(form))
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with cluster(workers=1, nursery=nursery):
            rpc.rpc_sync("worker0", log, args=("hello",))
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    said = capsys.readouterr().err
    assert re.search(r"\[worker0\] INFO of of\.worker in worker0 for driver#\d+: hello\n", said), (
        said
    )


def look_around() -> tuple[str, int, str, str]:
    return (
        os.environ["LOCAL_RANK"],
        torch.get_num_threads(),
        os.environ["FLAVOUR"],
        os.environ["PREPARED"],
    )


def test_workers_are_made_ready_before_they_serve(nursery: Nursery) -> None:
    flavours = {name: {"FLAVOUR": name.upper()} for name in ("ps", "trainer")}
    greeting = "hello"

    def setup() -> None:  # a local function that captures a variable
        os.environ["PREPARED"] = f"{greeting} {os.environ['WEFT_WORKER_NAME']}"

    with cluster(
        names=["ps", "trainer"],
        nursery=nursery,
        env=flavours,
        setup=setup,
        threads=3,
        devices="cpu",
    ):
        assert rpc.rpc_sync("ps", look_around) == ("0", 3, "PS", "hello ps")
        assert rpc.rpc_sync("trainer", look_around) == ("1", 3, "TRAINER", "hello trainer")


@pytest.mark.parametrize("restarts", [0, 5])
def test_a_setup_that_fails_is_the_cause(
    nursery: Nursery, capsys: pytest.CaptureFixture[str], restarts: int
) -> None:
    def setup() -> None:
        if os.environ["WEFT_WORKER_NAME"] == "worker1":
            raise KeyError("no such data set")

    group = cluster(workers=2, nursery=nursery, setup=setup, restarts=restarts)
    with pytest.raises(LaunchError, match=r"setup of worker 'worker1' failed: KeyError") as caught:
        group.start()
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.worker, caught.value.exit_code) == ("worker1", 1)
    # The error is told once. PyTorch 2.15's compiler writes lines of its own as a process ends.
    assert "no such data set" not in capsys.readouterr().err
    assert group.pids == {}


def test_a_setup_that_does_not_end_is_named(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    options = rpc.RpcBackendOptions(init_timeout=1.0)
    group = cluster(workers=1, nursery=nursery, setup=compute_for_ever, rpc_backend_options=options)
    with pytest.raises(LaunchError, match=r"'worker0' has not joined within 1 s, and its setup="):
        group.start()
    assert "in compute_for_ever\n" in capsys.readouterr().err


def kill_one(group: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Kills a worker, and waits until the launcher reports it."""
    rpc.rpc_sync("worker1", say, args=("last words",))
    os.kill(group.pids["worker1"], signal.SIGKILL)
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return told.endswith("its last lines:\n    LAST WORDS\n")

    wait_until(is_told, PROMPT_S)
    assert "worker 'worker1' (rank 2, pid " in told
    assert "was killed by SIGKILL" in told
    assert "worker1 (ended)" in repr(group)


def test_a_worker_that_dies_is_named_at_once_and_at_the_end(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(LaunchError, match=r"'worker1'.* was killed by SIGKILL") as caught,
        cluster(workers=2, nursery=nursery) as group,
    ):
        kill_one(group, capsys)
    assert (caught.value.worker, caught.value.exit_code) == ("worker1", -signal.SIGKILL)


def test_a_death_that_is_expected_is_no_error(
    nursery: Nursery, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "WAIT_S", LIMIT_S)
    with cluster(workers=2, nursery=nursery, check=False) as group:
        waiting = rpc.rpc_async("worker1", time.sleep, args=(60,))
        kill_one(group, capsys)
        with pytest.raises(WorkerLost, match=r": it was killed by SIGKILL"):
            waiting.wait()
        waiting = rpc.rpc_async("worker0", time.sleep, args=(60,))
        rpc.rpc_async("worker0", os._exit, args=(3,))
        with pytest.raises(WorkerLost, match=r": it ended with exit code 3"):
            waiting.wait()
    capsys.readouterr()


def multiply_for_ever() -> None:
    """Is within C++ most of the time, without the lock of the interpreter."""
    matrix = torch.ones(300, 300)
    while True:
        torch.mm(matrix, matrix)


def leave_soon() -> None:
    """Has the worker not wait for functions that run."""
    node.END_LIMIT_S = 0.0


def test_a_worker_that_is_interrupted_in_a_function_ends_by_that_signal(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
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
    monkeypatch.setattr(local_cluster, "serve_job", lambda *args, **options: broken)
    start_s = time.monotonic()
    group = cluster(workers=1, nursery=nursery)
    with pytest.raises(LaunchError, match=r"'worker0'.* ended with exit code 1"):
        group.start()
    assert time.monotonic() - start_s < LIMIT_S
    assert "its last lines:\n    no licence\n" in capsys.readouterr().err
    assert group.pids == {}


def test_names_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="say how many workers"):
        cluster()
    with pytest.raises(ConfigurationError, match="must be at least 1"):
        cluster(workers=0)
    with pytest.raises(ConfigurationError, match="names both the caller and a worker"):
        cluster(workers=1, name="worker0")


def test_workers_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n"
        "from torchweft.launch import cluster\n"
        "with cluster(workers=2) as group:\n"
        "    print(*group.pids.values(), flush=True)\n"
        "    signal.pause()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as caller:
        assert caller.stdout is not None
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        assert len(pids) == 2
        caller.kill()
    wait_until(lambda: are_gone(pids) and not list(tmp_path.glob("weft-cluster-*")), PROMPT_S)
