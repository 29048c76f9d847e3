"""``torchweft.cluster``: worker processes around the test, forked from one warm process."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchweft import rpc
from torchweft.errors import ConfigurationError, LaunchError
from torchweft.launch import Cluster, Nursery, cluster

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
