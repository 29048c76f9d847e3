"""Calls that run for a lost worker are cancelled."""

from __future__ import annotations

import os
import signal

import pytest

import torchweft
from tests import remains
from tests.contract.processes import functions, timing
from tests.contract.processes.functions import options, wait_until
from torchweft import rpc
from torchweft.launch import Nursery


def call_and_wait(to: str) -> None:
    """Makes calls whose caller, this process, is killed before they end."""
    for function in (timing.until_cancelled, timing.sleep_until_cancelled):
        rpc.rpc_async(to, function, args=(function.__name__,), timeout=0)
    value = rpc.remote(to, timing.until_cancelled, args=("value",))
    other = rpc.remote(to, timing.sleep_until_cancelled, args=("value of a coroutine",))
    rpc.rpc_sync(to, functions.pass_gate, args=("never",), timeout=0)
    del value, other


def noted(name: str) -> list[object]:
    return rpc.rpc_sync("worker0", timing.noted, args=(name,))


def test_what_runs_for_a_lost_worker_is_told(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["until_cancelled", "sleep_until_cancelled", "value", "value of a coroutine"]
    with torchweft.cluster(
        workers=2,
        nursery=nursery,
        rpc_backend_options=options(num_worker_threads=6),
        check=False,
    ) as group:
        rpc.rpc_async("worker1", call_and_wait, args=("worker0",), timeout=0)
        for name in names:
            wait_until(lambda n=name: len(noted(n)) == 1, lambda n=name: f"{n} does not begin")  # type: ignore[misc]
        os.kill(group.pids["worker1"], signal.SIGKILL)
        for name in names:
            wait_until(lambda n=name: len(noted(n)) == 2, lambda n=name: f"{n} is not told")  # type: ignore[misc]
        wait_until(
            lambda: rpc.rpc_sync("worker0", remains.count_references) == {"owned": 0, "held": 0},
            lambda: "something stays",
        )
        capsys.readouterr()
