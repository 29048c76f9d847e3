"""The display of maps on real workers: one worker is slow, and then lost."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import pytest

import torchweft
from tests.contract.processes.functions import options, wait_until
from tests.processes.mapreduce_functions_d import never_on
from torchweft import mapreduce
from torchweft.launch import Nursery
from torchweft.progress import work

OFTEN_S = 0.01


def one_each(worker: str | None) -> list[Any]:
    """Cuts a map into one part for each of the two workers."""
    return [(name, (worker,), {}) for name in ("worker0", "worker1")]


def await_line(out: io.StringIO, line: str) -> None:
    wait_until(lambda: line in out.getvalue(), lambda: f"no {line!r} in {out.getvalue()!r}")


def behind(shown: mapreduce.progress) -> list[int]:
    return [found.part for found in shown.stragglers() if found.worker == "worker1"]


def test_a_slow_worker_is_named_and_then_its_loss(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LEAST_S", 0.0)
    out = io.StringIO()
    with (
        torchweft.cluster(
            workers=2, nursery=nursery, rpc_backend_options=options(), check=False
        ) as group,
        mapreduce.progress(label="step", out=out, interval_s=OFTEN_S) as shown,
    ):

        def run(worker: str | None) -> Any:
            return mapreduce.remote_async_call(
                never_on, args=(worker,), partitioner=one_each, rerun=True, timeout=20
            )

        assert run(None).wait() == ["worker0", "worker1"]
        shown.step()
        slow = run("worker1")
        await_line(out, "worker1 is behind: part 1 of never_on for ")
        # The line may stem from the first map, in which a busy machine delayed the worker.
        wait_until(lambda: behind(shown) == [1], lambda: f"behind: {behind(shown)}")
        os.kill(group.pids["worker1"], signal.SIGKILL)
        assert slow.wait() == ["worker0", "worker0"]
        await_line(out, "worker1 was lost; part 1 runs again on another\n")
        assert shown.stragglers() == ()
        assert shown.workers["worker1"].is_lost
        assert [share.parts for share in shown.workers.values()] == [3, 1]
    assert out.getvalue().splitlines()[-1].startswith("step: 1 step, 4 parts in ")
