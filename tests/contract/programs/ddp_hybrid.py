"""A large embedding on ``ps``, a dense part under DDP on two trainers, and a master that drives.

The trainers look up words of their own, so the order of their updates does not matter. They take
turns in their steps: each steps the whole table, and PyTorch's optimizers take no lock on it.
"""

import json
import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions
from torch.nn.parallel import DistributedDataParallel as DDP

EMBEDDINGS, WIDTH, CLASSES = 40, 16, 8


class HybridModel(nn.Module):
    def __init__(self, remote_emb_module, device):
        super().__init__()
        self.remote_emb_module = remote_emb_module
        self.fc = DDP(nn.Linear(WIDTH, CLASSES).to(device))
        self.device = device

    def forward(self, indices, offsets):
        emb_lookup = self.remote_emb_module.forward(indices, offsets)
        return self.fc(emb_lookup.to(self.device))


def get_next_batch(rank):
    """Yields bags of words from this trainer's half of the table."""
    generator = torch.Generator().manual_seed(rank)
    half = EMBEDDINGS // 2
    for _ in range(4):
        indices = torch.randint(rank * half, (rank + 1) * half, (24,), generator=generator)
        offsets = torch.arange(0, 24, 4)
        yield indices, offsets, indices[offsets] % CLASSES


def _run_trainer(remote_emb_module, rank):
    torch.manual_seed(rank)
    model = HybridModel(remote_emb_module, "cpu")
    model_parameter_rrefs = model.remote_emb_module.remote_parameters()
    for parameter in model.fc.parameters():
        model_parameter_rrefs.append(RRef(parameter))
    opt = DistributedOptimizer(optim.SGD, model_parameter_rrefs, lr=0.2)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(3):
        for indices, offsets, target in get_next_batch(rank):
            with dist_autograd.context() as context_id:
                loss = criterion(model(indices, offsets), target)
                dist_autograd.backward(context_id, [loss])
                for turn in range(2):
                    if turn == rank:
                        opt.step(context_id)
                    dist.barrier()
                losses.append(loss.item())
    return losses, model.fc.module.weight.detach().double().sum().item()


def run_master():
    remote_emb_module = RemoteModule(
        "ps", nn.EmbeddingBag, args=(EMBEDDINGS, WIDTH), kwargs={"mode": "sum"}
    )
    futs = []
    for trainer_rank in [0, 1]:
        fut = rpc.rpc_async(
            f"trainer{trainer_rank}", _run_trainer, args=(remote_emb_module, trainer_rank)
        )
        futs.append(fut)
    (losses0, weight0), (losses1, weight1) = [fut.wait() for fut in futs]
    assert weight0 == weight1
    table = remote_emb_module.get_module_rref().rpc_sync().state_dict()["weight"]
    lookup = remote_emb_module.forward_async(torch.arange(4), torch.tensor([0, 2])).wait()
    results = {
        "trainer0": losses0,
        "trainer1": losses1,
        "dense": weight0,
        "table": table.double().sum().item(),
        "lookup": lookup.tolist(),
    }
    print(json.dumps(results))


def run_worker(rank, world_size, rpc_port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29500")
    # Another port than that of the process group.
    rpc_backend_options = TensorPipeRpcBackendOptions()
    rpc_backend_options.init_method = f"tcp://localhost:{rpc_port}"
    names = ["trainer0", "trainer1", "master", "ps"]
    if rank <= 1:
        dist.init_process_group(backend="gloo", rank=rank, world_size=2)
    elif rank == 3:
        torch.manual_seed(7)
    rpc.init_rpc(
        names[rank], rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    if rank == 2:
        run_master()
    rpc.shutdown()
    if rank <= 1:
        dist.destroy_process_group()


def find_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    world_size = 4
    # Forked, not spawned: four processes that import everything take their time.
    arguments = (world_size, find_port())
    mp.start_processes(run_worker, arguments, nprocs=world_size, start_method="fork")
