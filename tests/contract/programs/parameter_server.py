"""Trainers share a model that a parameter server holds; they take turns, one step each.

The processes are forked, as this kind of program often does.
"""

import json
import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

TRAINERS, STEPS = 2, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.dropout = nn.Dropout2d(0.25)
        self.fc1 = nn.Linear(36, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, images):
        features = torch.max_pool2d(torch.relu(self.conv(images)), 2)
        hidden = torch.relu(self.fc1(self.dropout(features).flatten(1)))
        return torch.log_softmax(self.fc2(hidden), dim=1)


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    args = [method, rref, *args]
    return rpc.rpc_sync(rref.owner(), call_method, args=args, kwargs=kwargs)


class ParameterServer(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.model = Net()
        self.input_device = torch.device("cpu")

    def forward(self, inputs):
        return self.model(inputs.to(self.input_device)).to("cpu")

    def get_dist_gradients(self, context_id):
        gradients = dist_autograd.get_gradients(context_id)
        return {parameter.cpu(): gradient.cpu() for parameter, gradient in gradients.items()}

    def get_param_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


param_server = None
global_lock = threading.Lock()


def get_parameter_server(seed=0):
    """Returns the one parameter server, whichever trainer asks first."""
    global param_server
    with global_lock:
        if not param_server:
            param_server = ParameterServer(seed=seed)
        return param_server


def run_parameter_server(rank, world_size):
    rpc.init_rpc(name="parameter_server", rank=rank, world_size=world_size)
    rpc.shutdown()


class TrainerNet(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server, args=(seed,))

    def get_global_param_rrefs(self):
        return remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, inputs):
        return remote_method(ParameterServer.forward, self.param_server_rref, inputs)


my_turn = threading.Semaphore(0)


def give_turn():
    my_turn.release()


def get_batches(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        target = torch.randint(0, 4, (8,), generator=generator)
        yield torch.randn(8, 1, 8, 8, generator=generator) + target.view(-1, 1, 1, 1), target


def run_training_loop(rank):
    net = TrainerNet(seed=11)
    opt = DistributedOptimizer(optim.SGD, net.get_global_param_rrefs(), lr=0.1)
    losses, sizes = [], []
    for data, target in get_batches(rank):
        my_turn.acquire()
        with dist_autograd.context() as context_id:
            loss = nn.functional.nll_loss(net(data), target)
            dist_autograd.backward(context_id, [loss])
            gradients = remote_method(
                ParameterServer.get_dist_gradients, net.param_server_rref, context_id
            )
            assert gradients != {}
            sizes.append(sorted(gradient.numel() for gradient in gradients.values()))
            opt.step(context_id)
        losses.append(loss.item())
        rpc.rpc_sync(f"trainer_{rank % TRAINERS + 1}", give_turn)
    print(json.dumps({"trainer": rank, "losses": losses, "gradients": sizes}))


def run_worker(rank, world_size):
    rpc.init_rpc(name=f"trainer_{rank}", rank=rank, world_size=world_size)
    if rank == 1:
        give_turn()
    run_training_loop(rank)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    processes = []
    for rank in range(TRAINERS + 1):
        target = run_worker if rank else run_parameter_server
        process = mp.Process(target=target, args=(rank, TRAINERS + 1))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    raise SystemExit(any(process.exitcode for process in processes))
