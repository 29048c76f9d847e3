"""The first call to a stopped worker keeps its time limit, and does not lose the worker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.processes.functions import add, stop
from tests.open_workers import OpenWorkers
from tests.processes import leaving
from torchweft import rpc
from torchweft.errors import CallTimeout

LIMIT_S = 0.6
SLACK_S = 1.5


@pytest.fixture
def workers(warm: OpenWorkers, tmp_path: Path) -> Iterator[OpenWorkers]:
    """Workers ``a``, ``b`` and ``c``; those of ``b`` and ``c`` have no connection yet."""
    for name in leaving.NAMES:
        warm.begin(name, leaving.join, name, str(tmp_path / "store"), 3)
    for name in leaving.NAMES:
        warm.result(name)
    yield warm
    for name in leaving.NAMES:
        warm.kill(name)


def ask(to: str, way: str, timeout: float) -> tuple[float, object]:
    began_s = time.monotonic()
    try:
        if way == "sync":
            outcome: object = rpc.rpc_sync(to, add, args=(1, 2), timeout=timeout)
        else:
            outcome = rpc.rpc_async(to, add, args=(1, 2), timeout=timeout).wait()
    except Exception as error:
        outcome = error
    return time.monotonic() - began_s, outcome


_started: list[object] = []


def start(to: str, way: str) -> float:
    """Starts a call that has no limit; returns how many seconds that took."""
    began_s = time.monotonic()
    if way == "remote":
        _started.append(rpc.remote(to, add, args=(1, 2)))
    else:
        _started.append(rpc.rpc_async(to, add, args=(1, 2), timeout=0))
    return time.monotonic() - began_s


def outcome(timeout: float) -> object:
    """Returns the result of the call, or None if it does not come in time."""
    (started,) = _started
    if isinstance(started, rpc.RRef):
        try:
            return started.to_here(timeout=timeout)
        except CallTimeout:
            return None
    assert isinstance(started, rpc.Future)
    return started.wait() if timeout > LIMIT_S or started.done() else None


def states() -> dict[str, str]:
    return {each.worker.name: each.state.name for each in rpc.health()}


@pytest.mark.parametrize("way", ["async", "remote"])
def test_whoever_starts_a_call_does_not_wait_for_the_connection(
    workers: OpenWorkers, way: str
) -> None:
    pid = workers.do("c", os.getpid)
    stop(pid)
    assert workers.do("b", start, "c", way) < SLACK_S
    assert workers.do("b", outcome, LIMIT_S) is None
    os.kill(pid, signal.SIGCONT)
    assert workers.do("b", outcome, 20.0) == 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_stopped_worker_is_waited_for_and_not_lost(workers: OpenWorkers, way: str) -> None:
    assert workers.do("b", states)["c"] == "UNUSED"
    pid = workers.do("c", os.getpid)
    stop(pid)
    took_s, error = workers.do("b", ask, "c", way, LIMIT_S)
    assert isinstance(error, CallTimeout)
    assert "'c'" in str(error)
    assert error.worker == "c"
    assert took_s < LIMIT_S + SLACK_S
    assert workers.do("b", states)["c"] != "LOST"
    workers.begin("b", ask, "c", way, 20.0)
    assert workers.do("a", ask, "b", way, 20.0)[1] == 3
    os.kill(pid, signal.SIGCONT)
    assert workers.result("b")[1] == 3
    assert workers.do("b", states)["c"] == "CONNECTED"
