"""``torchweft.cluster(restarts=...)``: workers are killed, come back and are called again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.contract.processes.functions import stop, wait_until
from torchweft import rpc
from torchweft.errors import (
    ConfigurationError,
    LaunchError,
    RendezvousTimeout,
    UnknownWorker,
    WorkerLost,
)
from torchweft.launch import Cluster, Nursery, cluster

PROMPT_S = 8.0

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("quick_restarts")]


def life() -> tuple[int, int]:
    return int(os.environ["WEFT_RESTART_COUNT"]), os.getpid()


def life_of(name: str) -> tuple[int, int]:
    found: tuple[int, int] = rpc.rpc_sync(name, life)
    return found


def kill(group: Cluster, name: str) -> None:
    """Kills a worker, and returns when its calls fail."""
    waiting = rpc.rpc_async(name, time.sleep, args=(60,))
    os.kill(group.pids[name], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=name):
        waiting.wait()


def test_a_killed_worker_comes_back_and_is_called_again(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with cluster(workers=2, nursery=nursery, restarts=2, seed=1) as group:
        other = life_of("worker1")
        drawn = rpc.rpc_sync("worker0", torch.rand, args=(4,))
        for count in (1, 2):
            kill(group, "worker0")
            group.wait_for("worker0", 20.0)
            assert life_of("worker0") == (count, group.pids["worker0"])
            assert torch.equal(rpc.rpc_sync("worker0", torch.rand, args=(4,)), drawn)
            # From the worker that stayed, and from the new one.
            assert rpc.rpc_sync("worker1", life_of, args=("worker0",))[0] == count
            assert rpc.rpc_sync("worker0", life_of, args=("worker1",)) == other
        assert "worker0 (pid" in repr(group)
    told = capsys.readouterr().err
    assert re.search(r"'worker0' \(rank 1, pid \d+\) was killed by SIGKILL .* restart 1 of 2", told)
    assert "weft: worker 'worker0' runs again, with pid" in told


def answers(name: str) -> bool:
    with contextlib.suppress(WorkerLost, UnknownWorker):
        return life_of(name)[0] > 0
    return False


def test_a_worker_is_waited_for_until_the_others_know_it(nursery: Nursery) -> None:
    with cluster(workers=2, nursery=nursery, restarts=2) as group:
        stop(group.pids["worker1"])
        try:
            kill(group, "worker0")
            wait_until(lambda: answers("worker0"), lambda: "worker0 does not come back")
            with pytest.raises(RendezvousTimeout):
                group.wait_for("worker0", 0.1)
        finally:
            os.kill(group.pids["worker1"], signal.SIGCONT)
        group.wait_for("worker0", 20.0)
        assert rpc.rpc_sync("worker1", life_of, args=("worker0",))[0] == 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_another_one_has_lost_is_waited_for(nursery: Nursery) -> None:
    with cluster(workers=2, nursery=nursery, restarts=1) as group:
        before = group.pids["worker1"]
        with pytest.raises(WorkerLost) as caught:
            rpc.rpc_sync("worker0", rpc.rpc_sync, args=("worker1", die))
        group.wait_for(caught.value.worker, 20.0)
        assert group.pids["worker1"] != before
        assert life_of("worker1") == (1, group.pids["worker1"])


def test_work_that_is_under_way_is_finished_before_the_cluster_closes(nursery: Nursery) -> None:
    with cluster(workers=2, nursery=nursery, restarts=1):
        last = rpc.remote("worker0", torch.add, args=(torch.ones(2), 1))
        future = rpc.rpc_async("worker1", add_later, args=(last,))
        del last
    assert future.wait().tolist() == [4.0, 4.0]


def add_later(reference: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.2)
    return reference.to_here() + 2


def test_a_worker_that_dies_too_often_is_not_waited_for(nursery: Nursery) -> None:
    group = cluster(workers=1, nursery=nursery, restarts=1).start()
    kill(group, "worker0")
    group.wait_for("worker0", 20.0)
    kill(group, "worker0")
    used_up = r"'worker0'.*SIGKILL.* its restarts are used up"
    with pytest.raises(LaunchError, match=used_up):
        group.wait_for("worker0", 20.0)
    with pytest.raises(LaunchError, match=used_up) as caught:
        group.close()
    assert (caught.value.worker, caught.value.exit_code) == ("worker0", -signal.SIGKILL)


def test_an_exception_in_the_block_ends_the_workers_at_once(nursery: Nursery) -> None:
    start_s = end_s = 0.0
    try:
        with cluster(workers=2, nursery=nursery, restarts=1) as group:
            pids = list(group.pids.values())
            rpc.rpc_async("worker0", time.sleep, args=(60,))
            start_s = time.monotonic()
            raise ZeroDivisionError
    except ZeroDivisionError:
        end_s = time.monotonic()
    assert 0 < end_s - start_s < PROMPT_S
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_number_of_restarts_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="number of restarts is -1"):
        cluster(workers=1, restarts=-1)
