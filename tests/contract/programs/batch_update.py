"""A parameter server that waits for all trainers' gradients, updates once and answers them all."""

import json
import os
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim

TRAINERS, STEPS = 2, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Tanh())
        self.head = nn.Linear(32, 5)

    def forward(self, inputs):
        return self.head(self.layers(inputs))


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size=TRAINERS):
        torch.manual_seed(1)
        self.model = Net()
        self.lock = threading.Lock()
        self.future_model = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.norms = []

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, grads):
        self = ps_rref.local_value()
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            with self.lock:
                parameter.grad += grad
        with self.lock:
            self.curr_update_size += 1
            fut = self.future_model
            if self.curr_update_size >= self.batch_update_size:
                for parameter in self.model.parameters():
                    parameter.grad /= self.batch_update_size
                self.norms.append(sum(p.grad.norm().item() for p in self.model.parameters()))
                self.curr_update_size = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                fut.set_result(self.model)
                self.future_model = torch.futures.Future()
        return fut


class Trainer:
    def __init__(self, ps_rref):
        self.ps_rref = ps_rref
        self.loss_fn = nn.MSELoss()
        self.generator = torch.Generator().manual_seed(rpc.get_worker_info().id)

    def get_next_batch(self):
        for _ in range(STEPS):
            inputs = torch.randn(16, 10, generator=self.generator)
            yield inputs, inputs[:, :5] - inputs[:, 5:]

    def train(self):
        name = rpc.get_worker_info().name
        model = self.ps_rref.rpc_sync().get_model()
        losses = []
        for inputs, labels in self.get_next_batch():
            loss = self.loss_fn(model(inputs), labels)
            loss.backward()
            losses.append(loss.item())
            model = rpc.rpc_sync(
                self.ps_rref.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.ps_rref, [parameter.grad for parameter in model.cpu().parameters()]),
            )
        return name, losses


def run_trainer(ps_rref):
    return Trainer(ps_rref).train()


def run_ps(trainers):
    server = BatchUpdateParameterServer()
    ps_rref = rpc.RRef(server)
    futs = [rpc.rpc_async(trainer, run_trainer, args=(ps_rref,), timeout=0) for trainer in trainers]
    done = torch.futures.collect_all(futs).wait()
    results = dict(fut.wait() for fut in done)
    print(json.dumps({"losses": results, "norms": server.norms}))


def run(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29500")
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=30)
    name = f"trainer{rank}" if rank else "ps"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        run_ps([f"trainer{number}" for number in range(1, world_size)])
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(TRAINERS + 1,), nprocs=TRAINERS + 1, join=True)
