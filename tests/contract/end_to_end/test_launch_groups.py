"""``torchweft run`` with workers that make a group, so each of them needs torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.weft_run import Start, finish, read_line, running

SOON = ("--backoff", "0.05")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from running(tmp_path)


@pytest.mark.parametrize("is_full", [False, True])
def test_those_who_fail_because_of_another_one_say_so_in_a_line(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setenv("WEFT_LAUNCH_GRACE_S", "20")
    if is_full:
        monkeypatch.setenv("WEFT_TRACEBACKS", "full")
    body = """
    from torchweft import rpc
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # They have the time to tell of their own error.
    rpc.init_rpc()
    if os.environ["RANK"] != "1":
        waiting = rpc.rpc_async("worker1", time.sleep, args=(60,))
        rpc.barrier()
        waiting.wait()
    rpc.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    status, _, err = finish(start(body, "--warm"), 40.0)
    assert status == 128 + signal.SIGKILL
    lost = [line for line in err if "worker 'worker1' (rank 1) is lost since " in line]
    assert {line[:9] for line in lost} == {"[worker0]", "[worker2]"}
    assert any("Traceback" in line for line in err) == is_full
    if not is_full:
        assert len(lost) == 2
        assert all("] weft: this worker ends because of another one: " in line for line in lost)
    assert "was killed by SIGKILL" in err[-1]


REJOIN = """
from pathlib import Path
import torch
from torchweft import rpc

def count():
    return int(os.environ["WEFT_RESTART_COUNT"])

def until(is_so):
    deadline_s = time.monotonic() + 15
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)

def lives():
    found = {}
    for info in rpc.get_worker_infos():
        try:
            found[info.name] = rpc.rpc_sync(info.name, count)
        except Exception:
            pass
    return found

rpc.init_rpc(rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=5, init_timeout=15))
if count() == 0:
    until(lambda: len(lives()) == 3)
    print(os.environ["RANK"], os.getpid())
victim = sys.argv[1]
until(lambda: lives() == {f"worker{rank}": int(str(rank) == victim) for rank in range(3)})
print("all met", count())
# Whoever leaves first is not there for those that still look around.
Path(sys.argv[2], os.environ["RANK"]).touch()
until(lambda: len(list(Path(sys.argv[2]).iterdir())) == 3)
rpc.shutdown(timeout=10)
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_in_an_open_group_the_others_talk_to_who_came_back(
    victim: int, tmp_path: Path, start: Start
) -> None:
    (tmp_path / "met").mkdir()
    process = start(
        REJOIN,
        *("--restarts", "1", "--restart", "worker", "--warm", *SOON),
        arguments=(str(victim), str(tmp_path / "met")),
    )
    lives = [list(map(int, read_line(process).split())) for _ in range(3)]
    pids = dict(lives)
    os.kill(pids[victim], signal.SIGKILL)
    status, out, err = finish(process, 40.0)
    assert status == 0, err
    assert sorted(out) == sorted(f"[worker{rank}] all met {int(rank == victim)}" for rank in pids)
