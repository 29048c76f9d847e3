"""``torchweft.compat`` in programs that start processes, as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_S = 150.0

Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program with arguments for Python; returns the lines that it prints, sorted."""

    def start(body: str, *arguments: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(body))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, *arguments, str(script), "a"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines())

    return start


CHILDREN = """
    import multiprocessing, os, subprocess, sys

    def say(kind, queue):
        import torch.distributed.rpc as rpc
        queue.put(f"{kind} {rpc.__name__}")

    def say_spawned(rank, queue):
        say("torch.multiprocessing", queue)

    if __name__ == "__main__":
        if sys.argv[1] == "subprocess":
            import torch.distributed.rpc as rpc
            print("subprocess", rpc.__name__)
            sys.exit()
        PREPARE
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        started = [subprocess.Popen([sys.executable, __file__, "subprocess"])]
        for kind in STARTED:
            context = multiprocessing.get_context(kind)
            started.append(context.Process(target=say, args=(kind, queue)))
            started[-1].start()
        if "forkserver" in STARTED:
            import torch.multiprocessing
            torch.multiprocessing.spawn(say_spawned, args=(queue,), nprocs=1)
        for process in started:
            getattr(process, "join", getattr(process, "wait", None))()
        while not queue.empty():
            print(queue.get())
"""
KINDS = ("fork", "forkserver", "spawn", "subprocess", "torch.multiprocessing")


def children(prepare: str, started: tuple[str, ...]) -> str:
    return CHILDREN.replace("PREPARE", prepare).replace("STARTED", repr(started))


def test_every_kind_of_child_has_it(run: Run) -> None:
    expected = [f"{kind} torchweft.compat.rpc" for kind in KINDS]
    program = children("pass", ("spawn", "forkserver", "fork"))
    assert run(program, "-m", "torchweft.compat") == expected


def test_children_do_without_it_where_they_shall(run: Run) -> None:
    prepare = "import torchweft.compat; torchweft.compat.install(in_children=False)"
    # The variable that all kinds but fork need is not set: two of them show it.
    expected = [
        f"{kind} {'torchweft.compat' if kind == 'fork' else 'torch.distributed'}.rpc"
        for kind in ("fork", "spawn", "subprocess")
    ]
    assert run(children(prepare, ("spawn", "fork"))) == expected


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def test_torchrun_runs_it(run: Run) -> None:
    body = """
        import os, sys
        import torch
        import torch.distributed.rpc as rpc

        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        value = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(1), rank)).item()
        sys.stdout.write(f"{rank} {rpc.__name__} {value} {sys.argv[1:]}\\n")
        rpc.shutdown()
    """
    lines = run(body, *TORCHRUN, "-m", "torchweft.compat")
    assert lines == [f"{rank} torchweft.compat.rpc {rank + 1.0} ['a']" for rank in range(2)]


def test_sharded_tensors_refer_to_each_others_shards(run: Run) -> None:
    body = """
        import os, sys
        import torch.distributed as dist
        import torch.distributed.rpc as rpc
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        for places in (["rank:0/cpu", "rank:1/cpu"], ["worker0/cpu", "worker1/cpu"]):
            spec = ChunkShardingSpec(dim=0, placements=places)
            tensor = sharded_tensor.zeros(spec, 4, 2, init_rrefs=True)
            tensor.local_shards()[0].tensor.fill_(rank + 1)
            dist.barrier()
            for other, references in tensor.remote_shards().items():
                for reference in references:
                    values = reference.to_here().tensor.unique().tolist()
                    owner = reference.owner().name
                    sys.stdout.write(f"{rank} {other} {owner} {values} {rpc.__name__}\\n")
            dist.barrier()
        rpc.shutdown()
        dist.destroy_process_group()
    """
    lines = run(body, "-m", "torchweft.compat", *TORCHRUN)
    both = ["0 1 worker1 [2.0] torchweft.compat.rpc", "1 0 worker0 [1.0] torchweft.compat.rpc"]
    assert lines == sorted(2 * both)


def test_what_a_process_is_worker_of_cannot_be_changed(run: Run) -> None:
    body = """
        import tempfile
        import torch, torch.distributed
        import torchweft.compat
        from torchweft.errors import AlreadyInitialized

        def work(change):
            rpc = torch.distributed.rpc
            with tempfile.NamedTemporaryFile() as file:
                options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file.name}")
                rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
                try:
                    change()
                except AlreadyInitialized:
                    print("refused by", rpc.__name__)
                print(rpc.rpc_sync("only", torch.add, args=(torch.ones(1), 2)).item())
                rpc.shutdown()

        for _ in range(2):
            work(torchweft.compat.install)
            torchweft.compat.install()
            work(torchweft.compat.uninstall)
            torchweft.compat.uninstall()
    """
    expected = ["3.0"] * 4
    expected += ["refused by torch.distributed.rpc"] * 2 + ["refused by torchweft.compat.rpc"] * 2
    assert run(body) == expected


LOADED_MEANWHILE = """
import sys
import torchweft.compat
names = ("torch.distributed.optim", "torch.distributed.nn")
torchweft.compat.install()
assert not [name for name in names if name in sys.modules]
import torch.distributed.optim, torch.distributed.nn, torch.distributed.nn.api.remote_module
import torch.distributed._shard.sharded_tensor.api as sharded
from torch.distributed import optim, nn, rpc
import torchweft.compat.optimizer, torchweft.compat.remote_module

assert optim.DistributedOptimizer is torchweft.compat.optimizer.DistributedOptimizer
assert optim.optimizer is torchweft.compat.optimizer
assert nn.RemoteModule is torchweft.compat.remote_module.RemoteModule
assert nn.api.remote_module is torchweft.compat.remote_module
assert sharded.rpc is sys.modules[sharded.__package__ + ".utils"].rpc is torchweft.compat.rpc
kept = (optim.ZeroRedundancyOptimizer, nn.functional, sharded.ShardedTensor)

torchweft.compat.uninstall()
assert kept == (optim.ZeroRedundancyOptimizer, nn.functional, sharded.ShardedTensor)
stock = torch.distributed.rpc
assert stock.__name__ == "torch.distributed.rpc" and stock.__spec__.loader.name == stock.__name__
assert sharded.rpc is sys.modules[sharded.__package__ + ".utils"].rpc is stock
for module, name in ((optim, "DistributedOptimizer"), (nn, "RemoteModule")):
    assert getattr(module, name).__module__.startswith(module.__name__), name
del stock, name, module
assert not [k for k, m in sys.modules.items() if k.startswith("torch.") and "weft" in m.__name__]

torchweft.compat.install()
assert optim.DistributedOptimizer is torchweft.compat.optimizer.DistributedOptimizer
assert nn.RemoteModule is torchweft.compat.remote_module.RemoteModule
assert sharded.rpc is torchweft.compat.rpc
"""


def test_modules_that_are_loaded_meanwhile_are_put_back_too() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", LOADED_MEANWHILE],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
