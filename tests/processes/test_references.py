"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import threading

import pytest

from tests.contract.processes import functions
from tests.contract.processes.functions import WORKER_THREADS, Tracked, wait_until
from torchweft import rpc
from torchweft.launch import Cluster
from torchweft.rpc.worker import current_worker

pytestmark = pytest.mark.keeps("threads", "descriptors")


def test_where_a_reference_was_made_is_where_the_program_did(group: Cluster) -> None:
    made = [rpc.RRef(1), rpc.remote("worker0", Tracked), rpc.remote("driver", Tracked)]
    made.append(made[1].remote().get())
    places = [line.split(": ")[0] for line in current_worker().references.report_leaks()]
    assert len(places) == len(made)
    assert all(f" made at {__file__}:" in place for place in places), places


def test_a_reference_dropped_before_its_value_is_made(group: Cluster) -> None:
    _may_go_on.clear()
    holding = [rpc.rpc_async("driver", hold_thread) for _ in range(WORKER_THREADS)]
    for number in range(3):
        rpc.remote("driver", functions.keep, args=(f"made {number}", number))
    keeper = current_worker().references
    wait_until(lambda: keeper.counts()["owned"] == 0, lambda: "the references were not dropped")
    _may_go_on.set()
    assert all(call.wait() for call in holding)
    # The calls run all the same, and the fixture checks that no value stays.
    wait_until(
        lambda: [functions._kept.get(f"made {number}") for number in range(3)] == [0, 1, 2],
        lambda: "the calls have not run",
    )


_may_go_on = threading.Event()


def hold_thread() -> bool:
    return _may_go_on.wait(functions.LIMIT_S)
