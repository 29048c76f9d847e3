"""``weft.cluster``: worker processes around the test, forked from one warm process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weft import rpc
from weft.errors import ConfigurationError, LaunchError
from weft.launch import Cluster, Nursery, cluster, local_cluster
from weft.launch.job import program_job

PROMPT_S = 2.0
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as warm:
        yield warm


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


def draw() -> tuple[float, int]:
    import numpy

    return float(numpy.random.random()), torch.get_num_threads()


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


def test_one_cluster_after_the_other(nursery: Nursery) -> None:
    group = cluster(names=["ps", "trainer"], name="me", nursery=nursery)
    for _ in range(2):
        with group:
            assert rpc.rpc_sync("trainer", call_back, args=("me",))[0] == "me"


def test_forked_workers_differ_where_they_must(nursery: Nursery) -> None:
    with cluster(workers=2, nursery=nursery):
        (first, threads), (second, _) = (rpc.rpc_sync(f"worker{rank}", draw) for rank in (0, 1))
    assert first != second
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


def kill_one(group: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Kills a worker, and waits until that is said."""
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
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(workers=2, nursery=nursery, check=False) as group:
        kill_one(group, capsys)


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
        "from weft.launch import cluster\n"
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
