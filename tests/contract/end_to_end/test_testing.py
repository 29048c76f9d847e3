"""``torchweft.testing`` in the tests of a program, which run in a pytest of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = 'pytest_plugins = ["torchweft.testing"]\n'
PROGRAM = """
import os
import signal
import time

import pytest
import torch
from torch import nn

import torchweft
from torchweft import rpc, testing
from torchweft.errors import CallTimeout, ConfigurationError, WorkerLost

kept = []
pids = []


def test_shared(weft_group):
    pids.append(weft_group.pids)
    assert rpc.rpc_sync("worker0", torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
    layer = rpc.remote("worker1", nn.Linear, (2, 3))
    assert layer.rpc_sync().forward(torch.ones(1, 2)).shape == (1, 3)


def test_shared_again(weft_group):
    assert weft_group.pids == pids[0]


def maps_of_parent():
    return open(f"/proc/{os.getppid()}/maps").read()


def test_workers_are_forked_from_a_process_that_has_imported_torch(weft_group):
    assert "libtorch" in rpc.rpc_sync("worker0", maps_of_parent)


@pytest.mark.weft(workers=3, name="trainer")
def test_killed(weft_own_group):
    assert rpc.get_worker_info().name == "trainer"
    assert list(weft_own_group.names) == ["worker0", "worker1", "worker2"]
    testing.kill(weft_own_group, "worker1")
    with pytest.raises(WorkerLost, match="worker1"):
        rpc.rpc_sync("worker1", os.getpid)
    assert rpc.rpc_sync("worker2", os.getpid) == weft_own_group.pids["worker2"]


def test_paused(weft_group):
    with testing.paused(weft_group, "worker0"), pytest.raises(CallTimeout):
        rpc.rpc_sync("worker0", os.getpid, timeout=0.2)
    assert rpc.rpc_sync("worker0", os.getpid) == weft_group.pids["worker0"]


def test_no_such_worker(weft_own_group):
    testing.kill(weft_own_group, "worker0")
    for name in ("worker7", "worker0"):
        with pytest.raises(ConfigurationError, match=f"no worker '{name}' runs in <Cluster"):
            testing.kill(weft_own_group, name)


@pytest.fixture
def layer(weft_group):
    return rpc.remote("worker0", nn.Linear, (2, 3))


def test_fixture(layer, weft_group):
    pids[:] = [weft_group.pids]
    assert layer.rpc_sync().forward(torch.ones(1, 2)).shape == (1, 3)


def end_a_worker():
    os.kill(pids[0]["worker0"], signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while rpc.health()[1].state is not rpc.WorkerState.LOST and time.monotonic() < deadline_s:
        time.sleep(0.01)


def test_beside_the_group():
    end_a_worker()


def test_after_a_worker_ended(weft_group):
    assert weft_group.pids != pids[0]
    pids[:] = [weft_group.pids]


def test_starts_a_group_itself(weft_nursery):
    end_a_worker()
    with torchweft.cluster(workers=1, nursery=weft_nursery):
        assert rpc.rpc_sync("worker0", len, ((),)) == 0


def test_ends_a_worker(weft_group):
    testing.kill(weft_group, "worker0")


def test_leaves(weft_group):
    weft_group.close()


def test_shared_anew(weft_group):
    pids[:] = [weft_group.pids]


@pytest.mark.weft(workers=3)
def test_mark_of_the_other(weft_group):
    pass


def test_leak(monkeypatch, weft_group):  # What is taken first ends last.
    monkeypatch.setattr(testing, "LIMIT_S", 0.1)
    kept.append(rpc.remote("worker0", nn.Linear, (2, 3)))


def test_after_a_leak(weft_group):
    kept.clear()
    assert weft_group.pids != pids[0]


def test_failed(weft_group):
    layer = rpc.remote("worker0", nn.Linear, (2, 3))  # The traceback keeps it.
    assert layer.is_owner()


def test_after_a_failure(weft_group):
    assert rpc.rpc_sync("worker0", os.getpid) == weft_group.pids["worker0"]


def test_two_groups(weft_group, weft_own_group):
    pass


@pytest.mark.weft(3)
def test_wrong_mark(weft_own_group):
    pass
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("program")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--strict-markers"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "shared",
        "shared_again",
        "workers_are_forked_from_a_process_that_has_imported_torch",
        "killed",
        "paused",
        "no_such_worker",
        "fixture",
        "after_a_worker_ended",
        "starts_a_group_itself",
        "shared_anew",
        "after_a_leak",
        "after_a_failure",
    ],
)
def test_programs_can_use_groups(output: str, name: str) -> None:
    assert f"::test_{name} PASSED" in output, output


def test_a_reference_that_is_left_fails_the_test(output: str) -> None:
    assert "ERROR test_program.py::test_leak - Failed: references are left after" in output, output
    assert "worker0 has {'owned': 1" in output


def test_a_test_that_failed_is_not_searched_for_references(output: str) -> None:
    assert "::test_failed FAILED" in output, output
    assert "ERROR test_program.py::test_failed" not in output, output


def test_two_groups_at_a_time_are_refused(output: str) -> None:
    assert "the test takes weft_group and weft_own_group" in output, output


def test_a_mark_with_positional_arguments_is_refused(output: str) -> None:
    assert "pass them by name: @pytest.mark.weft(workers=3)" in output, output
    # Leaks and ended workers are found after their tests.
    assert "1 failed, 16 passed, 6 errors" in output, output


def test_a_mark_without_effect_is_refused(output: str) -> None:
    assert "weft_group, which always has two workers" in output, output


def test_a_test_that_ends_the_shared_group_is_told_of_the_other(output: str) -> None:
    for name, text in (
        ("ends_a_worker", "a worker of the group that tests share has ended: worker 'worker0'"),
        ("leaves", "the test has left the group that tests share; a test that does so takes weft"),
    ):
        assert f"ERROR at teardown of test_{name} " in output, output
        assert text in output
