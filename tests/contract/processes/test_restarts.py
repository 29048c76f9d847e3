"""``torchweft run --restarts``: workers that are killed are started again."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.weft_run import (
    PROMPT_S,
    Start,
    finish,
    is_running,
    read_line,
    read_pids,
    running,
    wait_until_gone,
)

SOON = ("--backoff", "0.05")

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from running(tmp_path)


def told(err: list[str]) -> list[str]:
    """Returns the launcher's lines, with the values that differ between runs replaced."""
    said = [
        line.removeprefix("torchweft run: ") for line in err if line.startswith("torchweft run: ")
    ]
    patterns = {
        r"^[-0-9]{10} [:0-9]{8}": "NOW",
        r"pid \d+": "pid N",
        r"\d+\.\d s\b": "N s",
        r" \((not )?out of memory[^)]*\)": "",
    }
    for pattern, text in patterns.items():
        said = [re.sub(pattern, text, line) for line in said]
    return said


def test_a_killed_worker_has_the_whole_group_start_again(start: Start) -> None:
    body = """
    print(os.getpid(), os.environ["MASTER_PORT"])
    if os.environ["WEFT_RESTART_COUNT"] == "0":
        signal.pause()
    print("life", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"])
    """
    process = start(body, "--restarts", "2", *SOON)
    lives = read_pids(process, 3)
    pids, ports = lives[0::2], lives[1::2]
    os.kill(pids[1], signal.SIGKILL)
    status, out, err = finish(process)
    assert status == 0
    assert sorted(line for line in out if "life" in line) == [
        f"[worker{rank}] life 1 3" for rank in range(3)
    ]
    new = {number for line in out if "life" not in line for number in line.split("]")[1].split()}
    assert not new & {str(number) for number in [*pids, *ports]}
    assert len(new) == 4  # three processes and a port
    killed = f"worker 'worker{rank_of(pids[1], err)}' (rank {rank_of(pids[1], err)}, pid N)"
    assert told(err) == [
        f"NOW: {killed} was killed by SIGKILL after N s; ending the other 2",
        "starting all 3 workers again in N s, restart 1 of 2 within 60 min",
        "all 3 workers run again",
        "the group was started again once; these had died:",
    ]
    assert not any(is_running(pid) for pid in pids)


def rank_of(pid: int, err: list[str]) -> int:
    found = re.search(rf"rank (\d), pid {pid}\)", "\n".join(err))
    assert found is not None
    return int(found[1])


def test_a_limit_that_is_reached_ends_the_run_with_the_workers_exit_code(start: Start) -> None:
    body = """
    if os.environ["RANK"] == "1":
        sys.exit("life " + os.environ["WEFT_RESTART_COUNT"])
    signal.pause()
    """
    status, _, err = finish(start(body, "--restarts", "2", *SOON, count=2))
    assert status == 1
    assert [line for line in err if line.startswith("[")] == [
        f"[worker1] life {count}" for count in range(3)
    ]
    ended = "worker 'worker1' (rank 1, pid N) ended with exit code 1"
    assert told(err) == [
        f"NOW: {ended} after N s; ending the other one",
        "starting both workers again in N s, restart 1 of 2 within 60 min",
        "both workers run again",
        f"NOW: {ended} after N s; ending the other one",
        "starting both workers again in N s, restart 2 of 2 within 60 min",
        "both workers run again",
        f"NOW: {ended} after N s; all 2 restarts within 60 min are used up, "
        "ending the run with exit code 1",
        "the group was started again twice; these had died:",
        f"NOW: {ended} after N s; its last lines:",
    ]
    assert err[-1] == "    life 2"


def test_a_worker_that_will_not_end_does_not_hold_the_restart_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_LAUNCH_GRACE_S", "0.1")
    body = """
    if os.environ["WEFT_RESTART_COUNT"] == "1":
        sys.exit()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        print(os.getpid(), child)
    while True: signal.pause()
    """
    process = start(body, "--restarts", "1", *SOON, count=2)
    pids = read_pids(process, 2)
    os.kill(pids[0], signal.SIGKILL)
    status, _, _ = finish(process)
    assert status == 0
    assert not any(is_running(pid) for pid in pids)


def test_one_worker_is_started_again_and_the_others_work_on(start: Start) -> None:
    body = """
    signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit())
    outside = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    print(os.environ["RANK"], os.environ["WEFT_RESTART_COUNT"], os.getpid(), *outside)
    if os.environ["RANK"] == "2":
        sys.exit()
    while True: signal.pause()
    """
    process = start(body, "--restarts", "2", "--restart", "worker", *SOON)
    lives = sorted(list(map(int, read_line(process).split())) for _ in range(3))
    assert [life[:2] for life in lives] == [[0, 0], [1, 0], [2, 0]]
    pids = [life[2] for life in lives]
    for count in (1, 2):
        os.kill(pids[0], signal.SIGKILL)
        rank, restarts, pids[0] = map(int, read_line(process).split())
        assert (rank, restarts) == (0, count)
    for pid in pids[:2]:
        os.kill(pid, signal.SIGUSR1)
    status, out, err = finish(process)
    assert (status, out) == (0, [])
    killed = "worker 'worker0' (rank 0, pid N) was killed by SIGKILL"
    assert told(err) == [
        f"NOW: {killed} after N s; starting it again in N s, restart 1 of 2 within 60 min",
        "worker 'worker0' runs again, with pid N",
        f"NOW: {killed} after N s; starting it again in N s, restart 2 of 2 within 60 min",
        "worker 'worker0' runs again, with pid N",
        "workers were started again twice; these had died:",
    ]


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_ctrl_c_while_a_restart_is_waited_for_ends_all_at_once(scope: str, start: Start) -> None:
    body = """
    print(os.getpid())
    signal.pause()
    """
    process = start(body, "--restarts", "3", "--restart", scope, "--backoff", "1000", count=2)
    pids = read_pids(process, 2)
    os.kill(pids[0], signal.SIGKILL)
    assert process.stderr is not None
    seen = ""
    while "again in" not in seen:
        seen = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    status, _, err = finish(process)
    assert time.monotonic() - start_s < PROMPT_S
    assert status == 128 + signal.SIGINT
    wait_until_gone(pids, PROMPT_S)
    runs = {"group": "no worker runs, and none is started again", "worker": "ending the workers"}
    assert told(err)[0] == f"SIGINT, {runs[scope]}"


def test_restarts_leave_nothing_open_in_the_launcher(start: Start) -> None:
    body = """
    def parent(pid):
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("PPid"))
    launcher = parent(os.getppid())
    print(len(os.listdir(f"/proc/{launcher}/fd")), len(os.listdir(f"/proc/{os.getppid()}/fd")))
    sys.exit(os.environ["WEFT_RESTART_COUNT"] != "10")
    """
    options = ("--restarts", "10", "--restart", "worker", "--backoff", "0")
    status, out, _ = finish(start(body, *options, count=1))
    assert status == 0
    assert len(out) == 11
    assert out[-1] == out[1]


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_a_bug_that_fails_again_at_once_is_not_tried_three_times(start: Start, scope: str) -> None:
    process = start("import nowhere_at_all", "--restarts", "3", "--restart", scope, *SOON, count=1)
    status, _, err = finish(process)
    assert status == 1
    assert sum("ModuleNotFoundError" in line for line in err if line.startswith("[")) == 2
    ended = "worker 'worker0' (rank 0, pid N) ended with exit code 1"
    assert told(err)[-3:] == [
        f"NOW: {ended} after N s; it failed as the last time, at once, and is not started again, "
        "ending the run with exit code 1",
        f"{'the group was' if scope == 'group' else 'workers were'} started again once; these had "
        "died:",
        f"NOW: {ended} after N s: ModuleNotFoundError: No module named 'nowhere_at_all'",
    ]
