"""``torchweft run`` as users run it; most scripts import no torch, so they start at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.weft_run import (
    LIMIT_S,
    PROMPT_S,
    Start,
    finish,
    is_running,
    read_line,
    read_pids,
    running,
    wait_until_gone,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from running(tmp_path)


def test_three_workers_print_behind_their_names(start: Start) -> None:
    body = """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WEFT_WORKER_NAME", "MASTER_ADDR"):
        print(os.environ[name], end=" ")
    print(os.environ["MASTER_PORT"].isdigit(), os.environ["OMP_NUM_THREADS"].isdigit())
    print("rank", os.environ["RANK"], file=sys.stderr)
    print("ready", file=sys.stderr)
    """
    status, out, err = finish(start(body, "--names", "ps,trainer0,trainer1"))
    assert status == 0
    assert sorted(out) == [
        "[ps]       0 3 0 ps 127.0.0.1 True True",
        "[trainer0] 1 3 1 trainer0 127.0.0.1 True True",
        "[trainer1] 2 3 2 trainer1 127.0.0.1 True True",
    ]
    ranks = ["[ps]       rank 0", "[trainer0] rank 1", "[trainer1] rank 2"]
    assert sorted(line for line in err if "rank" in line) == ranks
    # Those that write it at about the same time are one line.
    ready = [line for line in err if line not in ranks]
    assert ready
    assert all(line.endswith(" ready") for line in ready)


def test_lines_of_workers_that_write_at_once_stay_whole(start: Start) -> None:
    body = """
    for number in range(2000):
        sys.stdout.write("<" + os.environ["RANK"] * 50)
        sys.stdout.write(">\\n")
    """
    status, out, _ = finish(start(body))
    assert status == 0
    expected = {f"[worker{rank}] <{str(rank) * 50}>": 2000 for rank in range(3)}
    assert {line: out.count(line) for line in set(out)} == expected


def test_a_worker_that_fails_ends_the_run_and_its_traceback_comes_last(start: Start) -> None:
    body = """
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    print("a warning of", os.getpid(), file=sys.stderr)
    signal.pause()
    """
    status, _, err = finish(start(body))
    assert status == 1
    at_once = next(line for line in err if line.startswith("torchweft run:"))
    assert "worker 'worker1' (rank 1, pid " in at_once
    assert at_once.endswith(" s; ending the other 2")
    # The traceback has just been shown, and is not shown again.
    assert err.count("[worker1] Traceback (most recent call last):") == 1
    assert sum("Traceback" in line for line in err) == 1
    assert "worker 'worker1' (rank 1, pid " in err[-1]
    assert "ended with exit code 1 after " in err[-1]
    assert err[-1].endswith(" s: ValueError: boom")


def test_a_traceback_that_is_out_of_view_comes_last(start: Start) -> None:
    body = """
    ready = __file__ + ".ready"
    if os.environ["RANK"] == "1":
        while not os.path.exists(ready): pass
        raise ValueError("boom")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("a line\\n" * 20))
    open(ready, "w").close()
    while True: signal.pause()
    """
    _, _, err = finish(start(body.replace("\\\\n", "\\n"), count=2))
    summary = next(index for index, line in enumerate(err) if line.endswith("its last lines:"))
    assert err[summary + 1] == "    Traceback (most recent call last):"
    assert err[-1] == "    ValueError: boom"


def test_exit_codes_and_signals_are_passed_on(start: Start) -> None:
    status, _, err = finish(start("sys.exit(41)", count=1))
    assert status == 41
    assert "ended with exit code 41 after " in err[-1]
    assert err[-1].endswith(" s; it wrote nothing to standard error")
    status, _, err = finish(start("os.kill(os.getpid(), signal.SIGSEGV)", count=1))
    assert status == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in err[-1]


def test_workers_that_ignore_sigterm_are_killed_after_the_grace(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_LAUNCH_GRACE_S", "0.1")
    body = f"""
    marker = {str(tmp_path / "ready")!r}
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid())
        open(marker, "w").close()
        while True: signal.pause()
    while not os.path.exists(marker):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start(body, count=2)
    pids = read_pids(process, 1)
    wait_until_gone(pids, PROMPT_S)
    assert finish(process)[0] == 128 + signal.SIGKILL


def test_ctrl_c_ends_even_workers_that_ignore_it(start: Start) -> None:
    body = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid())
    while True: signal.pause()
    """
    process = start(body)
    pids = read_pids(process, 3)
    process.send_signal(signal.SIGINT)
    wait_until_gone(pids, PROMPT_S)
    status, _, err = finish(process)
    assert status == 128 + signal.SIGINT
    assert err[0] == "torchweft run: SIGINT, ending the workers"


def test_ctrl_c_lets_workers_tidy_up(start: Start) -> None:
    body = """
    try:
        print(os.getpid())
        signal.pause()
    except KeyboardInterrupt:
        print("tidied up")
    """
    process = start(body)
    read_pids(process, 3)
    process.send_signal(signal.SIGINT)
    status, out, _ = finish(process)
    assert status == 128 + signal.SIGINT
    assert sorted(out) == [f"[worker{rank}] tidied up" for rank in range(3)]


def test_a_second_ctrl_c_kills_at_once(start: Start) -> None:
    body = """
    signal.signal(signal.SIGINT, lambda number, frame: print("0"))
    print(os.getpid())
    while True: signal.pause()
    """
    process = start(body, count=1)
    pids = read_pids(process, 1)
    process.send_signal(signal.SIGINT)
    read_pids(process, 1)  # the first one has arrived
    process.send_signal(signal.SIGINT)
    wait_until_gone(pids, 0.9)  # before the first one would lead to SIGTERM


@pytest.mark.parametrize("victim", ["launcher", "nursery"])
def test_no_worker_outlives_a_killed(victim: str, start: Start) -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        while True: signal.pause()
    print(os.getpid(), child, os.getppid())
    while True: signal.pause()
    """
    process = start(body)
    numbers = read_pids(process, 3)
    workers, grandchildren, nursery = numbers[0::3], numbers[1::3], numbers[2]
    os.kill(process.pid if victim == "launcher" else nursery, signal.SIGKILL)
    wait_until_gone([*workers, nursery], PROMPT_S)
    if victim == "launcher":
        wait_until_gone(grandchildren, PROMPT_S)
    for pid in filter(is_running, grandchildren):  # no process is left that tracks them
        os.kill(pid, signal.SIGKILL)


def test_what_a_worker_leaves_running_ends_with_it(start: Start) -> None:
    body = """
    child = os.fork()
    if child == 0:
        while True: signal.pause()
    print(child)
    """
    process = start(body, count=1)
    children = read_pids(process, 1)
    assert finish(process)[0] == 0
    wait_until_gone(children, PROMPT_S)


def test_output_into_a_closed_pipe_ends_the_run_quietly(start: Start) -> None:
    process = start("while True: print(os.getpid())")
    pids = read_pids(process, 1)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (128 + signal.SIGPIPE, "")
    wait_until_gone(pids, PROMPT_S)


def test_workers_meet_at_the_port_of_the_environment(start: Start) -> None:
    body = """
    import socket
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            server.accept()[0].close()
    else:
        while True:
            try:
                socket.create_connection(address).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    """
    assert finish(start(body, count=2))[0] == 0


def test_a_request_for_reports_reaches_every_worker_and_ends_none(start: Start) -> None:
    body = """
    signal.signal(signal.SIGQUIT, lambda *_: sys.exit(0))
    print("ready", flush=True)
    while True: signal.pause()
    """
    run = start(body, count=2)
    assert [read_line(run), read_line(run)] == ["ready", "ready"]
    run.send_signal(signal.SIGQUIT)
    status, _, err = finish(run)
    assert status == 0
    assert err[0] == "torchweft run: SIGQUIT, each worker writes what it does to a file"
