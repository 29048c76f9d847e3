"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.processes import functions
from tests.contract.processes.test_open_groups import Group
from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.agent.current import current
from torchweft.errors import WorkerLost
from torchweft.launch import Cluster

pytestmark = [pytest.mark.timeout(60), pytest.mark.keeps("threads", "descriptors")]

ROOT = Path(__file__).parents[3]

PROGRAM_LIMIT_S = 150.0
"""Two fresh interpreters import torch, beside whatever else the machine does."""


def codes_sent(to: str) -> int:
    """Returns how many codes this worker has sent to another one that keeps them now."""
    return len(current().find(to).sent_codes._table)


def codes_kept(of: str) -> int:
    """Returns how many codes this worker keeps for another one."""
    return len(current().find(of).kept_codes)


def test_code_is_sent_once_to_each_worker(group: Cluster) -> None:
    number = 3
    function = lambda value: value + number  # noqa: E731
    before = {name: codes_sent(name) for name in group.names}
    for name in group.names:
        for value in range(5):
            number = value
            assert rpc.rpc_sync(name, function, args=(1,)) == value + 1
            assert rpc.rpc_async(name, function, args=(2,)).wait() == value + 2
            assert rpc.remote(name, function, args=(3,)).to_here() == value + 3
        assert codes_sent(name) == before[name] + 1
        assert rpc.rpc_sync(name, codes_kept, args=("driver",)) == codes_sent(name)


def test_an_ordinary_call_sends_no_code(group: Cluster) -> None:
    before = codes_sent("worker0")
    assert rpc.rpc_sync("worker0", functions.add, args=(1, 2)) == 3
    assert rpc.rpc_sync("worker0", functions.collect, args=([1], {"a": torch.ones(1)}))
    assert codes_sent("worker0") == before


@pytest.fixture
def open_group(warm: OpenWorkers, tmp_path: Path) -> Iterator[Group]:
    made = Group(warm, tmp_path / "store")
    yield made
    made.close()


def call_often(to: str, value: int) -> tuple[int, int]:
    """Calls a function by value; returns the last result, and how many codes the callee keeps."""
    for number in range(3):
        result = rpc.rpc_sync(to, lambda x: x + value + number, args=(1,))  # noqa: B023
    return result, rpc.rpc_sync(to, codes_kept, args=(rpc.get_worker_info().name,))


def is_lost(to: str) -> bool:
    try:
        rpc.rpc_sync(to, functions.name_here, timeout=5)
    except WorkerLost:
        return True
    return False


def test_a_worker_that_came_back_is_sent_the_code_again(open_group: Group) -> None:
    open_group.join("a", 0)
    open_group.join("b", 1)
    assert open_group.do("a", call_often, "b", 5) == (8, 1)
    open_group.kill("b")
    functions.wait_until(lambda: open_group.do("a", is_lost, "b"), lambda: "b is not lost")
    functions.wait_until(lambda: open_group.do("a", codes_sent, "b") == 0, lambda: "still known")
    open_group.join("b", 1)
    assert open_group.do("a", call_often, "b", 6) == (9, 1)
    assert open_group.do("b", call_often, "a", 7) == (10, 1)


PROGRAM = """
import json, multiprocessing, os, sys
from torchweft import rpc
from torchweft.agent.current import current

total = 0

def add():
    global total
    total += 1
    return total

class Thing:
    pass

def is_thing(kind):
    return kind is Thing

def work(rank, method):
    options = rpc.RpcBackendOptions(init_method=method) if method else None
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if not rank:
        found = {
            "state stays": [rpc.rpc_sync("w1", add) for _ in range(3)],
            "class": rpc.rpc_sync("w1", is_thing, args=(Thing,)),
            "codes by name": len(current().find("w1").sent_codes._table),
            "lambda": rpc.rpc_sync("w1", lambda: [add(), is_thing(Thing)]),
            "codes of a lambda": len(current().find("w1").sent_codes._table),
        }
        with open(sys.argv[2], "w") as file:
            json.dump(found, file)
    rpc.shutdown()

if __name__ == "__main__":
    how, store = sys.argv[1], f"file://{sys.argv[2]}.store"
    if how == "by itself":
        work(int(os.environ["RANK"]), None)
    else:
        context = multiprocessing.get_context(how.removesuffix(" one"))
        ranks = (1,) if how.endswith("one") else (0, 1)
        started = [context.Process(target=work, args=(rank, store)) for rank in ranks]
        for process in started:
            process.start()
        if len(ranks) == 1:
            work(0, store)
        for process in started:
            process.join()
"""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

WEFT_RUN = ("-m", "torchweft", "run", "-n", "2")

STARTS = {
    "fork": ((), "fork"),
    "spawn, as a module": (("-m",), "spawn one"),
    "torchrun": (TORCHRUN, "by itself"),
    "torchweft run": ((*WEFT_RUN, "--warm"), "by itself"),
}

FEW = ("fork", "spawn, as a module", "torchweft run")
"""Those of each run. For a worker, torchrun differs from the last one by its name only."""


@pytest.mark.timeout(PROGRAM_LIMIT_S + 10)
@pytest.mark.parametrize(
    "start",
    [pytest.param(start, marks=() if start in FEW else pytest.mark.thorough) for start in STARTS],
)
def test_the_main_program_goes_by_name(start: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command, how = STARTS[start]
    program = "program" if command[-1:] == ("-m",) else "program.py"
    result = tmp_path / "result"
    run = subprocess.run(
        [sys.executable, *command, program, how, str(result)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])},
        timeout=PROGRAM_LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.exists(), run.stderr
    assert json.loads(result.read_text()) == {
        "state stays": [1, 2, 3],
        "class": True,
        "codes by name": 0,
        "lambda": [4, True],
        "codes of a lambda": 1,
    }
