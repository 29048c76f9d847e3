"""Health of the other workers as a program sees it: states, losses and their causes."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.functions import add, wait_until
from tests.open_workers import OpenWorkers
from tests.processes import leaving
from torchweft import rpc
from torchweft.errors import NotInitialized, WorkerLost
from torchweft.rpc import WorkerState

AT_ONCE_S = 1.0
"""Far below any timeout, and above the delays of a busy machine."""

_told: list[WorkerLost] = []


@pytest.fixture
def workers(warm: OpenWorkers, tmp_path: Path) -> Iterator[OpenWorkers]:
    for name in leaving.NAMES:
        warm.begin(name, leaving.join, name, str(tmp_path / "store"), 3)
    for name in leaving.NAMES:
        warm.result(name)
    yield warm
    for name in leaving.NAMES:
        warm.kill(name)


# Run by the workers


def listen() -> None:
    rpc.on_worker_lost(_told.append)


def listen_no_more() -> None:
    rpc.on_worker_lost(_told.append)()


def listen_badly() -> None:
    def fail(error: WorkerLost) -> None:
        raise RuntimeError("of the program")

    rpc.on_worker_lost(fail)


def told(count: int) -> list[WorkerLost]:
    wait_until(lambda: len(_told) >= count, lambda: f"told of {_told}")
    return _told


def states() -> list[rpc.WorkerHealth]:
    return rpc.health()


def call(to: str) -> int:
    return rpc.rpc_sync(to, add, args=(1, 2))


def have_children() -> int:
    """Makes a process that lives on when this one is killed, as data loaders do."""
    pid = os.fork()
    if not pid:
        time.sleep(30)
        os._exit(0)
    return pid


def errors_in_child(other: str) -> list[str]:
    """Returns the errors of a call, and of a reference that is held here, in a forked process."""
    held = rpc.remote(other, os.getpid)
    held.to_here()
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        for attempt in (lambda: rpc.rpc_sync(other, os.getpid), held.to_here):
            try:
                attempt()
            except NotInitialized as error:
                os.write(theirs, f"{error}\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        return told.read().splitlines()


# The tests


def test_states_from_no_connection_to_loss(workers: OpenWorkers) -> None:
    before = workers.do("b", states)
    assert [each.worker.name for each in before] == ["a", "b", "c"]
    # Every worker connects to the first one, and to others when it calls them.
    assert [each.state for each in before[1:]] == [WorkerState.SELF, WorkerState.UNUSED]
    workers.do("b", call, "c")
    assert workers.do("b", states)[2].state is WorkerState.CONNECTED
    workers.kill("c")
    wait_until(
        lambda: workers.do("b", states)[2].state is WorkerState.LOST, lambda: "it is not lost"
    )
    lost = workers.do("b", states)[2]
    assert lost.error is not None
    assert lost.error.worker == "c"
    assert lost.error.cause == "end of file"
    assert abs(lost.error.since - time.time()) < 10
    assert str(lost).startswith("c (rank 2): lost since ")
    assert str(lost).endswith(": end of file")


def leave_as_at_exit(error: Exception | None) -> float:
    """Does what the interpreter does at exit; returns how many seconds that takes."""
    if error is not None:
        sys.last_value = error
    began_s = time.monotonic()
    vars(multiprocessing.util)["_exit_function"]()
    return time.monotonic() - began_s


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, "its process ended without shutdown()"),
        (
            ValueError("bad input\nin lines"),
            "its program raised ValueError: bad input; its process ended without shutdown()",
        ),
    ],
)
def test_a_process_that_ends_without_shutdown_says_so(
    workers: OpenWorkers, error: Exception | None, cause: str
) -> None:
    workers.do("a", call, "b")
    assert workers.do("b", leave_as_at_exit, error) < 1.0
    wait_until(
        lambda: workers.do("a", states)[1].state is WorkerState.LOST, lambda: "it is not lost"
    )
    lost = workers.do("a", states)[1]
    assert lost.error is not None
    assert lost.error.cause == cause
    # A worker without a connection to it finds no listener.
    with pytest.raises(WorkerLost, match="its process has ended: nothing listens"):
        workers.do("c", call, "b")


def test_a_program_is_told_once_of_each(workers: OpenWorkers) -> None:
    workers.do("a", listen_badly)
    workers.do("a", listen)
    workers.do("a", listen_no_more)
    for name in "bc":
        workers.do("a", call, name)
        workers.kill(name)
    found = workers.do("a", told, 2)
    assert sorted(error.worker for error in found) == ["b", "c"]
    workers.do("a", listen)
    # A new listener is told of earlier losses; the former listener is not told twice.
    again = workers.do("a", told, 4)
    assert sorted(error.worker for error in again[2:]) == ["b", "c"]


def test_a_death_is_noticed_though_children_live_on(workers: OpenWorkers) -> None:
    """Children must not keep the connections of the worker that has made them."""
    workers.do("a", call, "b")
    pid = workers.do("b", os.getpid)
    child = workers.do("b", have_children)
    try:
        workers.do("a", listen)
        since_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert [error.worker for error in workers.do("a", told, 1)] == ["b"]
        assert time.monotonic() - since_s < AT_ONCE_S
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_process_is_no_worker_and_its_parent_stays_one(workers: OpenWorkers) -> None:
    workers.do("a", call, "b")
    errors = workers.do("b", errors_in_child, "a")
    assert len(errors) == 2
    assert all("which was forked from worker 'b': only that process" in each for each in errors)
    assert workers.do("a", call, "b") == 3
    assert workers.do("b", call, "a") == 3
