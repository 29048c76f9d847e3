"""The page on writing an application: its counter survives the loss of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.end_to_end.apart import LIMIT_S
from tests.inside import RunPage
from tests.pages import programs_of

PAGE = "docs/extending.md"

pytestmark = pytest.mark.timeout(LIMIT_S + 20)

PARTS = """
from counter import Counter, merge

from typing import NamedTuple

from torchweft import extending, rpc
from torchweft.errors import NotAllowed


@extending.rebuilds_plain
class Counted(NamedTuple):
    life: int
    times: int


def count(workers: list[str], times: int) -> Counted:
    counter = Counter("samples", workers)
    for _ in range(times):
        counter.add()
    return Counted(extending.this_worker().id, times)


def lie(keeper: str, workers: list[str], life: int) -> str:
    try:
        rpc.rpc_sync(keeper, merge, ("samples", workers, {life: 10**6}))
    except NotAllowed as error:
        return str(error)
    return "believed"
"""
PROGRAM = """
import os
import signal

from counter import Counter, merge
from parts import count, lie

import torchweft as weft
from torchweft import rpc

if __name__ == "__main__":
    options = weft.RpcBackendOptions(strict=True, callables=(count, lie, merge))
    with weft.cluster(workers=4, check=False, rpc_backend_options=options) as cluster:
        workers = ["worker0", "worker1", "worker2"]
        counter = Counter("samples", workers)
        calls = [rpc.rpc_async(f"worker{n}", count, args=(workers, 200)) for n in (2, 3)]
        for _ in range(50):
            counter.add()
        os.kill(cluster.pids["worker0"], signal.SIGKILL)
        for _ in range(50):
            counter.add()
        counted = [call.wait() for call in calls]
        print(counter.value() - sum(each.times for each in counted))
        print(rpc.rpc_sync("worker3", lie, ("worker1", workers, counted[0].life)))
        print(counter.value())
"""


def test_the_counter_survives_and_is_shown(run: RunPage, guide: Path) -> None:
    (program,) = [each for each in programs_of(PAGE) if each.printed]
    assert program.printed == "\n".join([*run(guide / program.name), ""])


def test_it_counts_on_strict_workers_while_one_is_lost(run: RunPage, guide: Path) -> None:
    (guide / "parts.py").write_text(PARTS)
    (guide / "strict.py").write_text(PROGRAM)
    value, refusal, same = run(guide / "strict.py")
    assert (value, same) == ("100", "500")
    assert refusal.startswith("worker 'worker3' may not tell what others have counted on worker")
