"""``auto_init_rpc`` in programs as users start them, and how all their processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 150.0
"""How long a program may take; on a busy machine imports take much of this time."""

PROMPT_S = 20.0
"""How soon all processes must end after the first; Weft's own time limits are longer."""

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
WEFT_RUN = ("-m", "torchweft", "run", "-n", "2", "--names", "trainer,helper")
LAUNCHED = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()

Process = subprocess.Popen[str]
Start = Callable[..., Process]
"""Starts Python with arguments and environment variables."""

Ended = tuple[int, str, str]
"""How a process ended: its exit status, standard output and standard error."""

SAMPLE = """
import os, sys
import torch
import torchweft.mapreduce.world as todist
from torchweft import rpc

def say(*words):
    # In one piece: print writes each word by itself where output is not buffered.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")

def worker_init_fn():
    torch.manual_seed(7 + todist.get_rank())

def seed():
    return torch.initial_seed(), todist.get_rank()

@todist.rank_non_zero_only
def greet():
    say("greetings of", todist.get_world_info().worker_name)

@todist.rank_zero_only
def train(steps):
    say("seeds", [rpc.rpc_sync(rank, seed) for rank in range(todist.get_world_size())])
    return steps

@todist.auto_init_rpc(worker_init_fn)
def main():
    greet()
    todist.barrier()
    return train(3)

if __name__ == "__main__":
    say("result", main(), tuple(todist.get_world_info()))
"""

# Rank 2 returns at once; rank 1 raises while rank 0 waits for it.
FAILING = """
import atexit, sys, threading, time
import torchweft.mapreduce.world as todist
from torchweft import rpc
from torchweft.errors import WorkerLost

is_called = threading.Event()

def work():
    is_called.set()
    while not rpc.is_cancelled():
        time.sleep(0.01)

@todist.on_rank(0)
def train():
    try:
        rpc.rpc_sync(1, work, timeout=0)
    except WorkerLost as lost:
        print("in train:", lost.worker, lost.cause)

@todist.on_rank(1)
def fail():
    is_called.wait()
    raise ValueError("boom")

@todist.auto_init_rpc(rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
def main():
    train()
    fail()

atexit.register(print, "handlers run")
main()
"""

# All ranks but one return at once and wait at their exit; the other rank prints and runs on.
STAYING = """
import atexit, os, sys, threading
import torchweft.mapreduce.world as todist
from torchweft import rpc

@todist.auto_init_rpc(rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]))
def main():
    if todist.get_rank() == int(sys.argv[2]):
        print("goes on", flush=True)
        threading.Event().wait()
    atexit.register(print, "waits", flush=True)

main()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    plain = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    started = []

    def start_python(*arguments: str, **variables: str) -> Process:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**plain, "NO_COLOR": "1", **variables},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_python
    for process in started:
        with process:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # a launcher and its children
            except ProcessLookupError:
                pass


@pytest.fixture
def start_three(start: Start, tmp_path: Path) -> Callable[..., list[Process]]:
    """Starts a program three times, without a launcher to end the others when one ends."""

    def start_all(body: str, *arguments: str) -> list[Process]:
        script = write(tmp_path, body)
        meeting = f"file://{tmp_path / 'meeting'}"
        return [
            start(script, meeting, *arguments, RANK=str(rank), WORLD_SIZE="3") for rank in range(3)
        ]

    return start_all


def write(folder: Path, body: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(body))
    return str(path)


def end_of(process: Process, limit_s: float = LIMIT_S) -> Ended:
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


def test_torchrun_starts_the_sample(start: Start, tmp_path: Path) -> None:
    status, out, err = end_of(start(*TORCHRUN, write(tmp_path, SAMPLE)))
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "greetings of worker1",
        "result 3 (0, 2, 0, 2)",
        "result None (1, 2, 1, 2)",
        "seeds [(7, 0), (8, 1)]",
    ]


def test_wefts_own_launcher_starts_the_sample(start: Start, tmp_path: Path) -> None:
    status, out, err = end_of(start(*WEFT_RUN, write(tmp_path, SAMPLE)))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[helper]  greetings of helper",
        "[helper]  result None (1, 2, 1, 2)",
        "[trainer] result 3 (0, 2, 0, 2)",
        "[trainer] seeds [(7, 0), (8, 1)]",
    ]


def test_the_sample_runs_alone(start: Start, tmp_path: Path) -> None:
    status, out, err = end_of(start(write(tmp_path, SAMPLE)))
    assert (status, err) == (0, "")
    assert out.splitlines() == ["seeds [(7, 0)]", "result 3 (0, 1, 0, 1)"]


def test_torchrun_reports_what_main_raised(start: Start, tmp_path: Path) -> None:
    program = SAMPLE.replace("    greet()\n    todist", "    greet(len)\n    todist")
    status, out, err = end_of(start(*TORCHRUN, write(tmp_path, program)))
    assert status == 1
    assert "result" not in out
    root_cause = err.partition("Root Cause (first observed failure):")[2]
    assert "TypeError: greet() takes 0 positional arguments but 1 was given" in root_cause


def test_when_main_raises_the_others_are_told_at_once_and_why(
    start_three: Callable[..., list[Process]],
) -> None:
    processes = start_three(FAILING)
    why = "its program raised ValueError: boom"
    status, out, err = end_of(processes[1])
    assert (status, out) == (1, "handlers run\n")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("\nValueError: boom\n")
    assert err.count("Traceback") == 1
    status, out, err = end_of(processes[0], PROMPT_S)
    assert (status, out) == (1, f"in train: worker1 {why}\nhandlers run\n")
    check_complaint(err, "worker0", lost="worker 'worker1' (rank 1)", why=why)
    status, out, err = end_of(processes[2], PROMPT_S)
    assert (status, out) == (1, "handlers run\n")
    check_complaint(err, "worker2", lost="worker 'worker1' (rank 1)", why=why)


@pytest.mark.parametrize("victim", [0, 1])
def test_nobody_waits_at_its_exit_for_one_that_is_killed(
    victim: int, start_three: Callable[..., list[Process]]
) -> None:
    processes = start_three(STAYING, str(victim))
    for rank, process in enumerate(processes):
        assert process.stdout is not None
        assert process.stdout.readline() == ("goes on\n" if rank == victim else "waits\n")
    processes[victim].kill()
    assert end_of(processes.pop(victim), PROMPT_S) == (-signal.SIGKILL, "", "")
    for process in processes:
        status, _, err = end_of(process, PROMPT_S)
        assert status == 1
        check_complaint(err, "worker", lost=f"worker 'worker{victim}' (rank {victim})", why="")


def check_complaint(err: str, who: str, *, lost: str, why: str) -> None:
    """Checks what a worker prints about a lost one: a line at its end, and one at the loss.

    A worker that hears of the loss while it ends prints the former alone.
    """
    *warnings, complaint = err.splitlines()
    assert len(warnings) <= 1, err
    assert all(each.startswith(f"{lost} is lost since ") for each in warnings), err
    assert complaint.startswith(f"weft: worker '{who}"), err
    assert f": shut down without every worker: {lost} is lost since " in complaint
    assert complaint.endswith(why)
