"""Failures while a group works: a worker that is killed, a channel that stops working."""

from __future__ import annotations

import os
import signal
import time

import pytest

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options, raised_by
from torchweft import rpc
from torchweft.errors import ShutdownError
from torchweft.launch import Nursery


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_worker_killed_while_it_is_waited_for_by_another(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    with torchweft.cluster(
        workers=2, nursery=nursery, rpc_backend_options=options(), check=False
    ) as group:
        path = ["worker0", "worker1"]
        call = rpc.rpc_async(
            "worker0", functions.call_through, args=(path[1:], os.kill, (os.getpid(), 0))
        )
        assert call.wait() is None
        call = rpc.rpc_async("worker0", functions.add_by, args=("worker1", _Killer(), 1))
        error = raised_by(call.wait)
        assert "worker 'worker1' (rank 2) is lost" in str(error)
        assert isinstance(error, RuntimeError)
        assert rpc.rpc_sync("worker0", functions.name_here) == "worker0"
        assert group.names == path
        capsys.readouterr()


class _Killer:
    """Kills the process that adds a value to it."""

    def __add__(self, other: object) -> None:
        kill(os.getpid())


def test_the_shutdown_of_survivors_names_who_is_lost(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    start_s = 0.0
    with pytest.raises(ShutdownError, match=r"worker 'worker1' \(rank 2\) is lost"):  # noqa: PT012, SIM117
        with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
            rpc.rpc_sync("worker0", functions.call_through, args=(["worker1"], len, ((),)))
            kill(group.pids["worker1"])
            start_s = time.monotonic()
            rpc.shutdown()
    assert time.monotonic() - start_s < 3.0
    assert "shut down without every worker" not in capsys.readouterr().out
