"""First steps: calls, references, autograd and optimizers, in processes that torchrun starts."""

import json
import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.optim import DistributedOptimizer


@torch.jit.script
def script_add(x, y):
    return x + y


def my_add(x, y):
    return x + y


def create_requires_grad():
    return torch.ones(2, requires_grad=True)


def call_in_all_ways(to):
    x = torch.zeros(2)
    return [
        rpc.rpc_sync(to, torch.add, args=(x, 1)).tolist(),
        rpc.rpc_async(to, my_add, args=(x, 2)).wait().tolist(),
        rpc.remote(to, script_add, args=(x, torch.ones(2))).to_here().tolist(),
    ]


def train(owners):
    parameters = [rpc.remote(owner, create_requires_grad) for owner in owners]
    opt = DistributedOptimizer(optim.SGD, parameters, lr=0.05)
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context_id:
            futures = [
                rpc.remote(owner, my_mul, args=(parameter, number + 2.0))
                for number, (owner, parameter) in enumerate(zip(owners, parameters, strict=True))
            ]
            loss = sum(future.to_here() for future in futures).pow(2).sum()
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
            losses.append(loss.item())
    return losses


def my_mul(rref, number):
    return rref.to_here() * number


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        print(json.dumps({"calls": call_in_all_ways("w1"), "losses": train(["w1", "w0"])}))
    dist.barrier()
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
