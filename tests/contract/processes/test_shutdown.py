"""``shutdown``: gracefully, at once, with a time limit; and what it leaves in the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import options
from torchweft import rpc
from torchweft.errors import NotInitialized, ShutdownError, WeftError, WorkerLost
from torchweft.launch import Cluster, Nursery


@pytest.fixture
def start(nursery: Nursery) -> Callable[..., Cluster]:
    return lambda workers=2: torchweft.cluster(
        workers=workers, nursery=nursery, rpc_backend_options=options()
    )


def test_references_that_are_alive_are_dropped_silently(
    start: Callable[..., Cluster],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with start():
        mine = rpc.RRef(functions.Tracked())
        theirs = [rpc.remote(name, functions.Tracked) for name in ("worker0", "worker1")]
        for name in ("worker0", "worker1"):
            rpc.rpc_sync(name, functions.keep, args=("kept", [mine, *theirs]))
    assert len(theirs) == 2
    assert "not released" not in caplog.text + capsys.readouterr().err


def test_circles_do_not_keep_the_group(
    start: Callable[..., Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    start_s = time.monotonic()
    with start():
        first = rpc.remote("worker0", functions.Tracked)
        second = rpc.remote("worker1", functions.Tracked)
        first.rpc_sync().set_other([first, second])
        second.rpc_sync().set_other([first])
        own = rpc.RRef(functions.Tracked())
        own.local_value().set_other([own, first])
        del first, second, own
    assert time.monotonic() - start_s < 3.0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("write", ["write_slowly", "write_soon", "write_after_calls"])
def test_what_has_begun_is_finished(
    start: Callable[..., Cluster], write: str, tmp_path: Path
) -> None:
    with start():
        for name in ("worker0", "worker1"):
            rpc.remote(name, getattr(functions, write), args=(str(tmp_path / name),))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker0", "worker1"]


LATE = r"longer than 0\.2 s; workers? '\w+'.* had (calls under way|not called shutdown)"
"""The second alternative occurs on a busy machine, whose workers call ``shutdown`` late."""


def test_a_time_limit(start: Callable[..., Cluster]) -> None:
    begin_s = 0.0
    with pytest.raises(ShutdownError, match=LATE):  # noqa: PT012, SIM117
        with start():
            rpc.rpc_async("worker0", functions.pass_gate, args=("never",), timeout=0)
            begin_s = time.monotonic()
            rpc.shutdown(timeout=0.2)
    assert 0.2 <= time.monotonic() - begin_s < 3.0


def test_afterwards_nothing_can_be_called(start: Callable[..., Cluster]) -> None:
    with start(1):
        reference = rpc.remote("worker0", functions.Tracked)
        done = rpc.rpc_async("worker0", functions.name_here)
        done.wait()
        rpc.shutdown()
        rpc.shutdown()
        for use in (
            lambda: rpc.rpc_sync("worker0", functions.name_here),
            lambda: rpc.rpc_async("worker0", functions.name_here),
            lambda: rpc.remote("worker0", functions.name_here),
            lambda: rpc.RRef(1),
            reference.to_here,
            reference.rpc_sync().get,
            rpc.get_worker_info,
        ):
            with pytest.raises(NotInitialized):
                use()
    assert done.wait() == "worker0"


def test_leaving_at_once_fails_what_waits(start: Callable[..., Cluster]) -> None:
    with pytest.raises(KeyError, match="over"):  # noqa: PT012, SIM117
        with start():
            mine = rpc.rpc_async("worker0", functions.pass_gate, args=("never",), timeout=0)
            fetch = rpc.remote("worker0", functions.pass_gate, args=("never",)).rpc_async().this()
            rpc.shutdown(graceful=False)
            for waiting in (mine, fetch):
                with pytest.raises(WeftError):
                    waiting.wait()
            raise KeyError("over")


def test_a_worker_that_leaves_at_once_is_lost_to_the_others(
    start: Callable[..., Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError, match="over"):  # noqa: PT012, SIM117
        with start():
            waiting = rpc.rpc_async("worker1", functions.pass_gate, args=("never",), timeout=0)
            leaving = rpc.rpc_async("worker1", rpc.shutdown, args=(False,))
            for future in (leaving, waiting):
                with pytest.raises(WorkerLost, match="worker1"):
                    future.wait()
            assert rpc.rpc_sync("worker0", functions.name_here) == "worker0"
            raise KeyError("over")
    capsys.readouterr()


def test_one_group_after_the_other_leaves_nothing(start: Callable[..., Cluster]) -> None:
    for number in range(3):
        with start(1):
            tensor = torch.full((1 << 19,), float(number))
            assert torch.equal(rpc.rpc_sync("worker0", functions.identity, args=(tensor,)), tensor)
            assert (
                rpc.remote("worker0", functions.Tracked, args=(number,)).to_here().content == number
            )
