"""Functions by value, and the main program, which goes by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.processes import functions
from torchweft import rpc
from torchweft.errors import SerializationError
from torchweft.launch import Cluster

pytestmark = [pytest.mark.timeout(60), pytest.mark.keeps("threads", "descriptors")]
ROOT = Path(__file__).parents[3]
PROGRAM_LIMIT_S = 150.0
"""Two fresh interpreters import torch, beside whatever else the machine does."""


# A closed group


def test_captured_values_are_those_of_the_call(group: Cluster) -> None:
    number = 3
    function = lambda value: value + number  # noqa: E731
    for name in group.names:
        for value in range(5):
            number = value
            assert rpc.rpc_sync(name, function, args=(1,)) == value + 1
            assert rpc.rpc_async(name, function, args=(2,)).wait() == value + 2
            assert rpc.remote(name, function, args=(3,)).to_here() == value + 3


def test_functions_that_torch_compiles_can_be_called_again(group: Cluster) -> None:
    """What ``torch.compile`` has kept of the first call must not serve the second function."""
    number = torch.ones(2)

    def add(value: torch.Tensor) -> torch.Tensor:
        return value + number

    def compiled_there(value: torch.Tensor) -> torch.Tensor:
        return torch.compile(lambda value: add(value), backend="eager")(value)

    compiled_here = torch.compile(add, backend="eager")
    for call in range(1, 4):
        number = torch.full((2,), float(call))
        for function in (compiled_there, compiled_here, lambda value: compiled_here(value)):
            arrived = rpc.rpc_sync("worker0", function, args=(torch.zeros(2),))
            assert torch.equal(arrived, number)


def test_captured_references_are_handed_on(group: Cluster) -> None:
    def call(way: str) -> Any:
        kept = [rpc.remote(name, functions.identity, args=(name,)) for name in group.names]
        reference = kept[0]
        function = lambda: (reference.to_here(), kept[1].to_here())  # noqa: E731
        return getattr(rpc, way)("worker0", function)

    assert call("rpc_sync") == ("worker0", "worker1")
    assert call("rpc_async").wait() == ("worker0", "worker1")
    assert call("remote").to_here() == ("worker0", "worker1")


def test_a_function_that_refers_to_the_cluster_is_refused_by_name(group: Cluster) -> None:
    with pytest.raises(SerializationError, match=r"variable 'group'.* such as cluster\.names$"):
        rpc.rpc_sync("worker0", lambda: group.names)


def test_functions_are_passed_on_from_worker_to_worker(group: Cluster) -> None:
    number = 3
    for _ in range(2):
        names = ["worker0", "worker1", "driver", "worker1"]
        args = (names, lambda value: value + number, (1,))
        assert rpc.rpc_sync("worker0", functions.call_through, args=args) == 4


# The main program, which goes by name wherever both workers run the same one

PROGRAM = """
import json, multiprocessing, os, sys
from torchweft import rpc

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
            "lambda": rpc.rpc_sync("w1", lambda: [add(), is_thing(Thing)]),
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
        "lambda": [4, True],
    }
