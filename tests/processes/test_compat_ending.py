"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.processes.test_compat_ending import (
    NAMES,
    NOTICE_S,
    SHORT_S,
    join,
    kept,
    next_name,
)
from tests.open_workers import OpenWorkers
from torchweft.compat import rpc
from torchweft.compat.rpc import api
from torchweft.engine.worker import current as current_agent
from torchweft.errors import CallTimeout, ShutdownError

pytestmark = pytest.mark.timeout(60)


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


def on_all(workers: OpenWorkers, function: Any, *args: Any) -> list[Any]:
    """Runs a function on all workers at a time; returns the results or errors."""
    for name in NAMES:
        workers.begin(name, function, *args)
    return [outcome_of(workers, name) for name in NAMES]


def outcome_of(workers: OpenWorkers, name: str) -> Any:
    try:
        return workers.result(name)
    except Exception as error:
        return error


def hold_a_reference() -> None:
    kept["reference"] = rpc.remote(next_name(), torch.ones, args=(2,))


def keep_no_leave(*_: Any) -> None:
    """Replaces the function that permits dropping references."""


def shut_down(*, ignore: bool = True, gives_leave: bool = True, timeout: float = 0.0) -> bool:
    """Shuts down; checks that no agent is left, also if the shutdown raises."""
    api._ignore_rref_leak = ignore
    if not gives_leave:
        api._delete_all_user_and_unforked_owner_rrefs = keep_no_leave  # type: ignore[assignment]
    try:
        rpc.shutdown(timeout=timeout)
    finally:
        assert not api._is_current_rpc_agent_set()
        assert not current_agent.is_set()
    return True


def shut_down_checking() -> bool:
    return shut_down(ignore=False)


def shut_down_without_leave() -> bool:
    return shut_down(ignore=False, gives_leave=False)


def shut_down_soon() -> bool:
    return shut_down(timeout=SHORT_S)


def use_after_a_while(reference: rpc.RRef[Any], path: str) -> None:
    time.sleep(3 * SHORT_S)  # The caller is in shutdown by now.
    other = rpc.remote(reference.owner(), torch.add, args=(reference.to_here(), 1))
    Path(path).write_text(str(other.to_here().tolist()))


def start_and_shut_down(path: str) -> bool:
    """Starts work that needs references, then shuts down."""
    rpc.rpc_async("worker1", use_after_a_while, args=(rpc.RRef(torch.ones(2)), path))
    return shut_down(ignore=False)


def test_what_may_not_be_dropped_is_a_leak(workers: OpenWorkers) -> None:
    on_all(workers, hold_a_reference)
    for error in on_all(workers, shut_down_without_leave):
        assert isinstance(error, ShutdownError)
        assert "Leaking RRef" in str(error)
        assert f"made at {__file__}:" in str(error)


def test_what_has_begun_keeps_its_references(workers: OpenWorkers, tmp_path: Path) -> None:
    path = tmp_path / "sum"
    workers.begin("worker0", start_and_shut_down, str(path))
    for name in NAMES[1:]:
        workers.begin(name, shut_down_checking)
    assert [outcome_of(workers, name) for name in NAMES] == [True] * 3
    assert path.read_text() == "[2.0, 2.0]"


def test_who_does_not_come_in_time_is_named(workers: OpenWorkers) -> None:
    for name in NAMES[:2]:
        workers.begin(name, shut_down_soon)
    leader, follower = (outcome_of(workers, name) for name in NAMES[:2])
    assert isinstance(leader, CallTimeout)
    assert "timed out in shutdown after 0.10 seconds" in str(leader)
    assert "'worker2'" in str(leader)
    assert isinstance(follower, (CallTimeout, ShutdownError))


def test_a_worker_that_died_is_not_waited_for(workers: OpenWorkers) -> None:
    for name in NAMES[:2]:
        workers.begin(name, shut_down_checking)
    workers.begin("worker2", os._exit, 3)
    start_s = time.monotonic()
    for name in NAMES[:2]:
        error = outcome_of(workers, name)
        assert isinstance(error, ShutdownError)
        assert error.missing in (("worker2",), ("worker0",))  # Or the leader, which then left.
    assert time.monotonic() - start_s < NOTICE_S


def keep_busy() -> None:
    """Holds all threads of the first worker's pool for longer than ``SHORT_S``."""
    busy = [rpc.rpc_async(NAMES[0], time.sleep, args=(10 * SHORT_S,)) for _ in range(3)]
    torch.futures.wait_all(busy)


def gather_in_short() -> str:
    rpc._set_rpc_timeout(SHORT_S)
    try:
        api._all_gather(rpc.get_worker_info().id)
    except CallTimeout as error:
        return str(error)
    raise AssertionError


def test_a_leader_does_not_wait_for_a_value_that_was_too_late_to_come(
    workers: OpenWorkers,
) -> None:
    """A worker does not begin a call whose time is up, and the leader has no limit of its own."""
    workers.begin(NAMES[2], keep_busy)
    time.sleep(SHORT_S)
    workers.begin(NAMES[1], gather_in_short)
    assert "RPC ran for more than set timeout" in workers.result(NAMES[1])
    workers.result(NAMES[2])
    workers.begin(NAMES[2], gather_in_short)
    workers.begin(NAMES[0], gather_in_short)
    expected = (
        f"timed out in _all_gather after {SHORT_S:.2f} seconds: worker '{NAMES[1]}' could not"
    )
    assert expected in workers.result(NAMES[0])
