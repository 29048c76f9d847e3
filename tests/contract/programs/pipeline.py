"""Two stages of a model on two workers, and a master that sends micro-batches through them."""

import itertools
import json
import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

BATCH, STEPS = 16, 3


class Stage(nn.Module):
    def __init__(self, seed, *sizes):
        super().__init__()
        torch.manual_seed(seed)
        self._lock = threading.Lock()
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        self.seq = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])

    def parameter_rrefs(self):
        return [RRef(parameter) for parameter in self.parameters()]


class Stage1(Stage):
    def forward(self, x_rref):
        x = x_rref.to_here()
        with self._lock:
            out = self.seq(x)
        return out.cpu()


class Stage2(Stage1):
    pass


class DistModel(nn.Module):
    def __init__(self, split_size, workers, *args, **kwargs):
        super().__init__()
        self.split_size = split_size
        self.p1_rref = rpc.remote(workers[0], Stage1, args=(1, 6, 24, 12), kwargs=kwargs)
        self.p2_rref = rpc.remote(workers[1], Stage2, args=(2, 12, 24, 3), kwargs=kwargs)

    def forward(self, xs):
        out_futures = []
        for x in iter(xs.split(self.split_size, dim=0)):
            x_rref = RRef(x)
            y_rref = self.p1_rref.remote().forward(x_rref)
            z_fut = self.p2_rref.rpc_async().forward(y_rref)
            out_futures.append(z_fut)
        return torch.cat(torch.futures.wait_all(out_futures))

    def parameter_rrefs(self):
        remote_params = []
        remote_params.extend(self.p1_rref.remote().parameter_rrefs().to_here())
        remote_params.extend(self.p2_rref.remote().parameter_rrefs().to_here())
        return remote_params


def run_master(split_size):
    model = DistModel(split_size, ["worker1", "worker2"])
    loss_fn = nn.MSELoss()
    opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.3)
    generator = torch.Generator().manual_seed(4)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 6, generator=generator)
        labels = inputs[:, :3] * inputs[:, 3:]
        with dist_autograd.context() as context_id:
            loss = loss_fn(model(inputs), labels)
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
        losses.append(loss.item())
    return losses


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29500")
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=128, rpc_timeout=300)
    name = f"worker{rank}" if rank else "master"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        for split_size in [BATCH, BATCH // 2, BATCH // 8]:
            print(json.dumps({"split_size": split_size, "losses": run_master(split_size)}))
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run_worker, args=(3,), nprocs=3, start_method="fork")
