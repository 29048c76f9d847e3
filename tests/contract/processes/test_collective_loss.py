"""``barrier`` and ``all_gather`` when a worker dies, or leaves, before it has come."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options, raised_by, wait_until
from tests.remains import count_gatherings
from torchweft import rpc
from torchweft.errors import NotInitialized, WorkerLost
from torchweft.launch import Nursery

WORKERS = ["worker0", "worker1"]
NOTICE_S = 5.0
"""A worker's end is noticed at once; the limit allows for busy machines."""


def test_a_lost_worker_is_not_waited_for(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with torchweft.cluster(
        workers=3, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        some = ["worker0", "worker1", "worker2"]
        waiting = [
            rpc.rpc_async(name, rpc.barrier, args=(workers, 0))
            for workers in (some, None)
            for name in ("worker0", "worker1")
        ]
        wait_until(
            lambda: rpc.rpc_sync("worker0", count_gatherings) == 2 and count_gatherings() == 1,
            lambda: "they did not come",
        )
        os.kill(group.pids["worker2"], signal.SIGKILL)
        start_s = time.monotonic()
        for call in waiting:
            error = raised_by(call.wait)
            assert isinstance(error, WorkerLost)
            assert error.worker == "worker2"
        # Later gatherings raise the loss; those without the lost worker succeed.
        for again in (rpc.barrier, lambda: rpc.all_gather(1)):
            assert isinstance(raised_by(again), WorkerLost)
        assert time.monotonic() - start_s < NOTICE_S
        left = rpc.rpc_async("worker0", rpc.all_gather, args=(0, ["worker0", "worker1"]))
        rpc.rpc_sync("worker1", rpc.barrier, args=(["worker1"],))
        assert rpc.rpc_sync("worker1", rpc.all_gather, args=(1, ["worker0", "worker1"])) == {
            "worker0": 0,
            "worker1": 1,
        }
        left.wait()
        capsys.readouterr()


def test_a_lost_leader_is_not_waited_for(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        waiting = rpc.rpc_async("worker1", rpc.barrier, args=(WORKERS, 0))
        wait_until(
            lambda: rpc.rpc_sync("worker0", count_gatherings) == 1, lambda: "it did not come"
        )
        os.kill(group.pids["worker0"], signal.SIGKILL)
        error = raised_by(waiting.wait)
        assert isinstance(error, WorkerLost)
        assert error.worker == "worker0"
        capsys.readouterr()


def meet_and_end() -> None:
    rpc.barrier(WORKERS)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_leader_that_ends_behind_a_barrier_has_told_the_others(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = options(num_worker_threads=1)
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=busy, check=False):
        waiting = meet_busy_worker(2.0)
        ended = rpc.rpc_async("worker0", meet_and_end)
        assert waiting.wait() is None
        assert isinstance(raised_by(ended.wait), WorkerLost)
        capsys.readouterr()


def meet_busy_worker(busy_s: float) -> rpc.Future[None]:
    """Has ``worker1`` come to a barrier, and then be too busy to be told that all have come."""
    waiting = rpc.rpc_async("worker1", rpc.barrier, args=(WORKERS,))
    wait_until(lambda: rpc.rpc_sync("worker0", count_gatherings) == 1, lambda: "it did not come")
    rpc.remote("worker1", time.sleep, args=(busy_s,))
    wait_until(
        lambda: any("sleep" in str(each) and each.has_begun for each in calls_of("worker1")),
        lambda: "it is not busy",
    )
    return waiting


def calls_of(worker: str) -> tuple[rpc.CallStatus, ...]:
    return rpc.stacks(worker).calls


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_worker_that_is_slow_to_be_told_does_not_fail_the_leader_of_a_barrier(
    nursery: Nursery, capsys: pytest.CaptureFixture[str], is_killed: bool
) -> None:
    busy = options(num_worker_threads=1)
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=busy, check=False
    ) as group:
        waiting = meet_busy_worker(60.0 if is_killed else 3.0)
        leading = rpc.rpc_async("worker0", rpc.barrier, args=(WORKERS, 0 if is_killed else 0.5))
        wait_until(
            lambda: rpc.rpc_sync("worker0", count_gatherings) == 0, lambda: "it did not come"
        )
        if is_killed:
            os.kill(group.pids["worker1"], signal.SIGKILL)
        assert leading.wait() is None
        if is_killed:
            assert isinstance(raised_by(waiting.wait), WorkerLost)
        else:
            assert not waiting.done()
            assert waiting.wait() is None
        capsys.readouterr()


def test_leaving_at_once_fails_who_waits(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[BaseException] = []
    with pytest.raises(KeyError, match="over"):  # noqa: PT012, SIM117
        with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()):
            rpc.rpc_sync("worker0", functions.name_here)
            thread = threading.Thread(target=lambda: errors.append(raised_by(rpc.barrier)))
            thread.start()
            wait_until(lambda: count_gatherings() == 1, lambda: "it did not begin")
            rpc.shutdown(graceful=False)
            thread.join()
            raise KeyError("over")
    assert isinstance(errors[0], NotInitialized)
    capsys.readouterr()
