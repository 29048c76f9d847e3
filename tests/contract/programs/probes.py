"""Small questions to the library, after what public programs do with it; prints each answer.

Run by two processes that are spawned; most questions are in the folder ``probing``.
"""

import json
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from probing import (  # noqa: F401
    asynchronous,
    calls,
    differences,
    errors,
    private,
    references,
    training,
)
from probing.registry import ask_all, failing, probe


def of_main(x):
    return ["main", x]


class OfMain:
    def __init__(self, x):
        self.x = x

    def get(self):
        return self.x


@torch.jit.script
def scripted(x, y: int):
    return x + y


@probe
def what_the_main_module_defines():
    return [
        rpc.rpc_sync("worker1", of_main, args=(1,)),
        rpc.rpc_sync("worker1", OfMain, args=(2,)).x,
        rpc.remote("worker1", OfMain, args=(3,)).rpc_sync().get(),
        rpc.rpc_sync("worker1", OfMain(4).get),
    ]


@probe
def script_functions():
    x = torch.ones(2)
    return [
        rpc.rpc_sync("worker1", scripted, args=(x, 1)).tolist(),
        rpc.rpc_async("worker1", scripted, args=(x,), kwargs={"y": 2}).wait().tolist(),
        rpc.remote("worker1", scripted, args=(x, 3)).to_here().tolist(),
    ]


def join_group(rank, world_size, number):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=20)
    if number == 0:
        options.init_method = f"tcp://localhost:{os.environ['MASTER_PORT']}"
        rpc.init_rpc(f"worker{rank}", rpc.BackendType.TENSORPIPE, rank, world_size, options)
    else:
        rpc.init_rpc(f"again{rank}", rank=rank, world_size=world_size)


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29500")
    before = [failing(rpc.get_worker_info, "has not been initialized")]
    before.append(failing(lambda: rpc.rpc_sync("worker1", of_main), "has not been initialized"))
    before.append(failing(rpc.shutdown, "has not been initialized"))
    join_group(rank, world_size, 0)
    gathered = [sorted(rpc.api._all_gather({"rank": rank}).items())]
    rpc.api._barrier(["worker0", "worker1"])
    gathered.append(sorted(rpc.api._all_gather(rank, {"worker0", "worker1"}, timeout=0).items()))
    if rank == 0:
        ask_all()
    again = failing(lambda: join_group(rank, world_size, 0), "already initialized")
    rpc.shutdown()
    after = [failing(rpc.get_worker_info, "has not been initialized")]
    join_group(rank, world_size, 1)
    after.append(rpc.rpc_sync(f"again{1 - rank}", of_main, args=("second group",)))
    after.append(rpc.get_rpc_timeout())
    rpc.shutdown(graceful=True)
    if rank == 0:
        print(json.dumps({"probe": "before_and_after", "result": [before, gathered, again, after]}))


if __name__ == "__main__":
    mp.spawn(run_worker, args=(2,), nprocs=2, join=True)
