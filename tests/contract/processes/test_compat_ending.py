"""``shutdown`` of ``torchweft.compat``: graceful, with and without leaks; debug information."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes.functions import wait_until
from tests.open_workers import OpenWorkers
from torchweft import WorkerInfo
from torchweft.compat import rpc
from torchweft.compat.rpc import api
from torchweft.errors import CallTimeout, NotInitialized

pytestmark = pytest.mark.timeout(60)
kept: dict[str, Any] = {}
NAMES = ("worker0", "worker1", "worker2")
SHORT_S = 0.1
NOTICE_S = 5.0


@pytest.fixture
def workers(warm: OpenWorkers, tmp_path: Path) -> Iterator[OpenWorkers]:
    """Three workers of a closed group."""
    for rank, name in enumerate(NAMES):
        warm.begin(name, join, name, rank, f"file://{tmp_path}/store")
    for name in NAMES:
        warm.result(name)
    yield warm
    for name in NAMES:
        warm.kill(name)


# Functions for the workers


def join(name: str, rank: int, method: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=3, rpc_timeout=10.0, init_method=method
    )
    rpc.init_rpc(name, rank=rank, world_size=len(NAMES), rpc_backend_options=options)


def next_name() -> str:
    return NAMES[(rpc.get_worker_info().id + 1) % len(NAMES)]


def join_with_an_open_call() -> tuple[str, str]:
    """Waits for the calls of this worker while one does not end; returns the error's facts."""
    called = rpc.rpc_async(next_name(), time.sleep, args=(3 * NOTICE_S,))
    agent: Any = api._get_current_rpc_agent()
    try:
        agent.join(timeout=SHORT_S)
    except CallTimeout as error:
        return error.worker, str(error)
    finally:
        called.cancel()
    raise AssertionError


def information() -> dict[str, str]:
    gc.collect()
    info: dict[str, str] = rpc._get_debug_info()
    return info


def keep(value: Any) -> None:
    kept["value"] = value


def forget() -> None:
    kept.clear()


def watch_a_reference() -> list[tuple[str, str, str]]:
    """Shares a value with another worker; returns reference counts before, meanwhile, after."""

    def counts() -> tuple[str, str, str]:
        # The user tells the owner that it has the reference after it has answered the call.
        under_way = ("num_pending_futures", "num_pending_children")
        wait_until(
            lambda: {information()[name] for name in under_way} == {"0"},
            lambda: str(information()),
        )
        info = information()
        return info["num_owner_rrefs"], info["num_forks"], info["num_pending_users"]

    reference = rpc.RRef(1)
    seen = [counts()]
    rpc.rpc_sync("worker1", keep, args=(reference,))
    seen.append(counts())
    rpc.rpc_sync("worker1", forget)
    wait_until(lambda: counts()[0] == "0", lambda: str(counts()))
    seen.append(counts())
    return seen


def measure_lateness() -> list[str | None]:
    name = "agent.gil_average_wait_time_us"
    values = [information().get(name)]
    for flag in (True, False):
        rpc.enable_gil_profiling(flag)
        values.append(information().get(name))
    return values


def busy_here() -> tuple[str, str, str]:
    info = information()
    return (
        info["agent.thread_pool_size"],
        info["agent.num_idle_threads"],
        info["agent.server_active_calls"],
    )


def ask_how_busy() -> tuple[tuple[str, str, str], str]:
    return rpc.rpc_sync("worker1", busy_here), information()["agent.client_active_calls"]


# Shutdown


class StubAgent:
    """The agent of a back-end with nothing underneath."""

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [WorkerInfo("alone", 0)]


@pytest.mark.parametrize("graceful", [True, False])
def test_a_backend_of_the_program(graceful: bool) -> None:
    agent = StubAgent()
    api._init_rpc_states(agent)
    try:
        assert api._get_current_rpc_agent() is agent
        rpc.shutdown(graceful=graceful)
    finally:
        api._reset_current_rpc_agent()
    with pytest.raises(NotInitialized, match="RPC has not been initialized"):
        rpc.shutdown()


# Information


def test_what_can_be_learnt_of_a_worker(workers: OpenWorkers) -> None:
    nothing = ("0", "0", "0")
    assert workers.do("worker0", watch_a_reference) == [nothing, ("1", "1", "0"), nothing]
    # worker1 runs the call that asks, and worker0 has no call open any more.
    assert workers.do("worker0", ask_how_busy) == (("3", "2", "1"), "0")
    before, meanwhile, after = workers.do("worker0", measure_lateness)
    assert (before, after) == (None, None)
    assert 0 <= float(meanwhile) < 1e6


# Errors while the group exists


def missing(key: str) -> None:
    raise KeyError(key)


def not_there(path: str) -> None:
    raise FileNotFoundError(2, "no such file", path)


def pass_on(to: str) -> None:
    rpc.rpc_sync(to, missing, args=("nested",))


WAYS: list[Callable[[str, Any, str], Any]] = [
    lambda to, function, text: rpc.rpc_sync(to, function, args=(text,)),
    lambda to, function, text: rpc.rpc_async(to, function, args=(text,)).wait(),
    lambda to, function, text: rpc.remote(to, function, args=(text,)).to_here(),
]


def catch_runtime_errors() -> list[tuple[str, str, Any]]:
    """Returns the types, texts and attributes of what ``except RuntimeError`` catches."""
    caught: list[tuple[str, str, Any]] = []
    for to in (next_name(), rpc.get_worker_info().name):
        for way in WAYS:
            for function, text in ((missing, "x"), (not_there, "/x"), (pass_on, "worker2")):
                try:
                    way(to, function, text)
                except RuntimeError as error:
                    copy = pickle.loads(pickle.dumps(error))
                    is_both = isinstance(copy, (KeyError, OSError)) and isinstance(
                        copy, RuntimeError
                    )
                    caught.append((type(error).__name__, str(error), is_both))
    return caught


def test_errors_of_others_are_runtime_errors_as_well(workers: OpenWorkers) -> None:
    assert (
        workers.do("worker0", catch_runtime_errors)
        == [
            ("KeyError", "'x'", True),
            ("FileNotFoundError", "[Errno 2] no such file: '/x'", True),
            ("KeyError", "'nested'", True),
        ]
        * 6
    )


def test_a_join_that_ends_by_its_limit_names_the_workers_of_open_calls(
    workers: OpenWorkers,
) -> None:
    worker, text = workers.do("worker0", join_with_an_open_call)
    assert worker == "worker1"
    assert "calls of this worker to worker 'worker1' have not ended" in text
