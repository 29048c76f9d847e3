"""``rpc.stacks`` and a signal show what a worker is doing while it does it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.processes.functions import WORKER_THREADS, options, wait_until
from torchweft import rpc
from torchweft.errors import CallTimeout
from torchweft.launch import Cluster, Nursery, cluster


def compute_until(path: str) -> None:
    while not os.path.exists(path):
        sum(range(1000))


async def pause_until(path: str) -> None:
    while not os.path.exists(path):
        await asyncio.sleep(0.01)


class Model:
    def forward(self, path: str) -> None:
        compute_until(path)


def hold_the_interpreter(path: str) -> None:
    """Waits in C, holding the interpreter lock, until the other end of the pipe is opened."""
    ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)


@pytest.fixture(scope="module")
def pair(nursery: Nursery) -> Iterator[Cluster]:
    with cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
        yield group


@pytest.fixture
def group(pair: Cluster) -> Cluster:
    return pair


def stacks_when(is_so: Callable[[rpc.WorkerStacks], bool]) -> rpc.WorkerStacks:
    told: list[rpc.WorkerStacks] = []

    def look() -> bool:
        told[:] = [rpc.stacks("worker0")]
        return is_so(told[0])

    wait_until(look, lambda: str(told[0]))
    return told[0]


def is_idle(thread: object) -> bool:
    return str(thread).endswith(": idle")


@pytest.mark.keeps("threads", "descriptors")
def test_a_worker_whose_threads_are_all_taken_says_what_they_do(
    group: Cluster, tmp_path: Path
) -> None:
    path = str(tmp_path / "go on")
    model = rpc.remote("worker0", Model)
    model.confirmed_by_owner()
    calls = [
        rpc.rpc_async("worker0", pause_until, args=(path,)),
        model.rpc_async().forward(path),
        rpc.rpc_async("worker1", rpc.rpc_sync, args=("worker0", compute_until, (path,))),
    ]
    stacks_when(lambda told: len(told.calls) == 3 and all(call.has_begun for call in told.calls))
    calls.append(rpc.rpc_async("worker0", os.getpid))
    # An idle thread may have just been woken for a call that another thread took first.
    told = stacks_when(lambda told: len(told.calls) == 4 and is_idle(told.threads[-1]))
    assert (told.worker, told.pid) == ("worker0", group.pids["worker0"])
    assert sorted((call.function, call.caller, call.has_begun) for call in told.calls) == [
        ("posix.getpid", "driver", False),
        (f"{__name__}.Model.forward", "driver", True),
        (f"{__name__}.compute_until", "worker1", True),
        (f"{__name__}.pause_until", "driver", True),
    ]
    assert all(0 <= call.age_s < 20 for call in told.calls)
    at_work = [thread for thread in told.threads if ", in compute_until" in str(thread)]
    assert len(at_work) == WORKER_THREADS
    assert any(", in pause_until\n    await asyncio.sleep" in str(each) for each in told.threads)
    assert f"\n  {__name__}.compute_until, called by 'worker1', since " in str(told)
    (tmp_path / "go on").touch()
    for call in calls:
        call.wait()


@pytest.mark.keeps("threads", "descriptors")
def test_where_the_interpreter_is_taken_the_signal_tells(
    group: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    call = rpc.rpc_async("worker1", hold_the_interpreter, args=(str(pipe),))
    error: CallTimeout | None = None
    while error is None:  # until the call has begun
        try:
            rpc.stacks("worker1", timeout=0.3)
        except CallTimeout as caught:
            error = caught
    assert "worker 'worker1' has not said within 0.3 s what it is doing: " in str(error)
    os.kill(group.pids["worker1"], signal.SIGUSR1)
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return " in hold_the_interpreter\n" in said

    wait_until(is_said, lambda: said)
    os.close(os.open(pipe, os.O_WRONLY))
    call.wait()


def test_a_worker_knows_its_own_stacks(group: Cluster) -> None:
    told = rpc.stacks()
    assert (told.worker, told.pid, told.calls) == ("driver", os.getpid(), ())
    names = {thread.name for thread in told.threads}
    assert "weft-driver-clock" in names
    assert any(re.fullmatch(r"weft-driver-\d+", name) for name in names)
    assert threading.main_thread().name not in names  # the thread that asks
