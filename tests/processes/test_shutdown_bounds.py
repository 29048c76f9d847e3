"""``shutdown`` ends in time whatever other workers do, and names the workers it waited for."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes.functions import options, stop
from tests.open_workers import OpenWorkers
from tests.processes import leaving
from tests.processes.leaving import END_LIMIT_S
from torchweft import rpc
from torchweft.errors import DuplicateName, ShutdownError
from torchweft.launch import Cluster, Nursery
from torchweft.launch.terms import Terms
from torchweft.rpc.node import current_node

LIMIT_S = 0.3
SLACK_S = 1.5
"""How much longer than the limits closing may take on a busy machine."""


@pytest.fixture
def workers(warm: OpenWorkers) -> Iterator[OpenWorkers]:
    yield warm
    for name in leaving.NAMES:
        warm.kill(name)


@pytest.fixture
def closed(workers: OpenWorkers, tmp_path: Path) -> OpenWorkers:
    """Workers ``a`` (the leader), ``b`` and ``c``, in a closed group."""
    join_all(workers, tmp_path, 3)
    return workers


@pytest.fixture
def opened(workers: OpenWorkers, tmp_path: Path) -> OpenWorkers:
    """The same workers in an open group, which has no leader."""
    join_all(workers, tmp_path, None)
    return workers


def join_all(workers: OpenWorkers, folder: Path, size: int | None) -> None:
    for name in leaving.NAMES:
        workers.begin(name, leaving.join, name, str(folder / "store"), size)
    for name in leaving.NAMES:
        workers.result(name)


def shut_down(
    workers: OpenWorkers, name: str, limit_s: float = LIMIT_S, closing_s: float = 0.0
) -> ShutdownError:
    """Shuts a worker down, which must fail in time; returns the error."""
    took_s, error = workers.do(name, leaving.shut_down, limit_s)
    assert isinstance(error, ShutdownError), error
    assert took_s < limit_s + closing_s + SLACK_S, took_s
    return error


def test_who_does_not_call_shutdown_is_named(closed: OpenWorkers) -> None:
    closed.begin("b", leaving.shut_down, 20.0)
    error = shut_down(closed, "a")
    assert error.missing == ("c",)
    assert "worker 'c' had not called shutdown" in str(error)
    assert isinstance(closed.result("b")[1], ShutdownError)


@pytest.mark.parametrize("is_connected", [True, False])
def test_who_was_stopped_is_named(closed: OpenWorkers, is_connected: bool) -> None:
    if is_connected:
        closed.do("a", leaving.greet_all)
    closed.begin("b", leaving.shut_down, 20.0)
    stop(closed.do("c", os.getpid))
    assert shut_down(closed, "a", closing_s=END_LIMIT_S).missing == ("c",)


def test_who_was_stopped_in_the_middle_is_named(closed: OpenWorkers) -> None:
    pid = closed.do("c", os.getpid)
    for name in "bc":
        closed.begin(name, leaving.shut_down, 20.0)
    closed.do("a", leaving.await_ready, 2)
    stop(pid)
    error = shut_down(closed, "a")
    # On a busy machine the leader's own report may come too late as well.
    assert error.missing in (("c",), ("a", "c"))
    assert "did not answer" in str(error)


def test_who_leads_is_named_where_it_does_not_answer(closed: OpenWorkers) -> None:
    stop(closed.do("a", os.getpid))
    error = shut_down(closed, "b", closing_s=END_LIMIT_S)
    assert error.missing == ("a",)
    assert "worker 'a' had not said that all are done" in str(error)


@pytest.mark.parametrize("limit_s", [20.0, 0.0])
def test_who_was_killed_is_not_waited_for(closed: OpenWorkers, limit_s: float) -> None:
    closed.begin("b", leaving.shut_down, 20.0)
    closed.kill("c")
    took_s, error = closed.do("a", leaving.shut_down, limit_s)
    assert isinstance(error, ShutdownError)
    assert error.missing == ("c",)
    assert took_s < SLACK_S
    assert closed.result("b")[1].missing == ("c",)


def test_who_has_calls_under_way_is_named(closed: OpenWorkers) -> None:
    closed.do("b", leaving.call_for_ever, "c")
    for name in "bc":
        closed.begin(name, leaving.shut_down, 20.0)
    error = shut_down(closed, "a")
    assert error.missing == ("b", "c")
    assert "workers 'b', 'c' had calls under way" in str(error)


def test_an_endless_function_of_its_own_does_not_keep_a_worker(closed: OpenWorkers) -> None:
    closed.do("b", leaving.call_for_ever, "a")
    for name in "bc":
        closed.begin(name, leaving.shut_down, 20.0)
    error = shut_down(closed, "a", closing_s=END_LIMIT_S)
    assert error.missing == ("a", "b")


def test_what_cannot_be_sent_does_not_keep_a_worker(closed: OpenWorkers) -> None:
    closed.do("a", leaving.greet_all)
    stop(closed.do("c", os.getpid))
    closed.do("a", leaving.send_much, "c")
    shut_down(closed, "a", closing_s=2 * END_LIMIT_S)


def test_leaving_at_once_does_not_wait(closed: OpenWorkers) -> None:
    closed.do("a", leaving.greet_all)
    stop(closed.do("c", os.getpid))
    took_s, error = closed.do("a", leaving.leave_at_once)
    assert error is None
    assert took_s < SLACK_S


def test_a_stopped_member_of_an_open_group_is_named(opened: OpenWorkers) -> None:
    stop(opened.do("c", os.getpid))
    error = shut_down(opened, "a", closing_s=END_LIMIT_S)
    assert error.missing == ("c",)
    assert "worker 'c' had not answered" in str(error)
    assert opened.do("b", leaving.names_here) == ["b", "c"]


def join_groups(rank: int, port: int) -> int:
    """Joins two groups, one after the other, at one address; rank 0 ends slowly."""
    for _ in range(2):
        at = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=20.0)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=at)
        if rank == 0:
            current_node().on_end["slowly"] = lambda: time.sleep(0.2)
        answer: int = rpc.rpc_sync(f"worker{1 - rank}", abs, args=(-rank,))
        rpc.shutdown()
    return answer


def test_the_next_group_does_not_meet_at_the_store_of_one_that_ends(warm: OpenWorkers) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for rank in range(2):
        warm.begin(f"worker{rank}", join_groups, rank, port)
    assert [warm.result(f"worker{rank}") for rank in range(2)] == [0, 1]


def test_two_workers_of_one_name(nursery: Nursery, capsys: pytest.CaptureFixture[str]) -> None:
    group = Cluster(Terms(["same"], "same", options(), nursery))
    error: BaseException | None = _error_of(group.start)
    assert error is not None
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__
    duplicate = [error for error in chain if isinstance(error, DuplicateName)]
    assert duplicate
    assert "ranks 0 and 1 both call themselves 'same'" in str(duplicate[0])
    capsys.readouterr()


def _error_of(action: Callable[[], Any]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        return error
    return None
