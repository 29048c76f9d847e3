"""Functions for the workers of the DDP tests: trainers with replicas, a server with a table."""

from __future__ import annotations

import datetime
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import torchweft
from torchweft import rpc
from torchweft.optim import DistributedOptimizer

ROWS, WIDTH = 6, 4
SERVER = "worker2"
Named = dict[str, Tensor]

_lock = threading.Lock()
_replicas: dict[str, Any] = {}
_tables: dict[str, nn.Embedding] = {}


def join(rank: int, size: int, path: str) -> None:
    """Makes this worker a rank of the group of trainers, over loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=20),
    )


def join_all(names: Sequence[str], folder: Path) -> None:
    """Makes workers the ranks of a group of trainers, which meet by a file of the folder."""
    size, path = len(names), str(folder / "store")
    calls = [rpc.rpc_async(name, join, args=(rank, size, path)) for rank, name in enumerate(names)]
    for call in calls:
        call.wait()


# Models


class Net(nn.Module):
    """Two layers, and a third that is used only if the input has an even number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3)
        self.second = nn.Linear(3, WIDTH)
        self.spare = nn.Linear(3, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        result: Tensor = self.second(hidden)
        return result if len(inputs) % 2 else result + self.spare(hidden)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """Returns a module with the same random parameters in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


def make_net() -> Net:
    net: Net = seeded(Net, 1)
    return net


def make_table() -> nn.Embedding:
    table: nn.Embedding = seeded(lambda: nn.Embedding(ROWS, WIDTH), 2)
    return table


def make_replica(name: str, options: dict[str, Any]) -> None:
    """Makes a module under DDP; all trainers must call this."""
    _replicas[name] = DistributedDataParallel(make_net(), **options)


def drop_replica(name: str) -> None:
    del _replicas[name]


def table(name: str) -> nn.Embedding:
    with _lock:  # Both trainers ask for it at once.
        if name not in _tables:
            _tables[name] = make_table()
        return _tables[name]


def look_up(name: str, indices: Tensor) -> Tensor:
    found: Tensor = table(name)(indices)
    return found


def table_gradient(name: str, context_id: int) -> Tensor:
    return torchweft.autograd.get_gradients(context_id)[table(name).weight]


def apply_replica(name: str, inputs: Tensor) -> Tensor:
    """Applies a replica; other workers call this."""
    outputs: Tensor = _replicas[name](inputs)
    return outputs


def gradients(name: str, context_id: int) -> Named:
    """Returns the gradients of this worker's replica in a context."""
    return _named(name, torchweft.autograd.get_gradients(context_id))


def _named(name: str, found: dict[Tensor, Tensor]) -> Named:
    parameters = _replicas[name].module.named_parameters()
    return {key: found[tensor] for key, tensor in parameters if tensor in found}


def grads(name: str) -> Named:
    parameters = _replicas[name].module.named_parameters()
    return {key: tensor.grad for key, tensor in parameters if tensor.grad is not None}


# Programs of a trainer; all trainers run the same program, each with its own batch


def loss_of(name: str, indices: Tensor) -> Tensor:
    embedded = rpc.rpc_sync(SERVER, look_up, args=(name, indices))
    outputs: Tensor = _replicas[name](embedded)
    return outputs.square().mean()


def run_pass(name: str, indices: Tensor) -> tuple[Named, Tensor]:
    """Returns the gradients of the replica and of the table."""
    with torchweft.autograd.context() as context_id:
        torchweft.autograd.backward(context_id, [loss_of(name, indices)])
        remote = rpc.rpc_sync(SERVER, table_gradient, args=(name, context_id))
        return gradients(name, context_id), remote


def run_residual_pass(name: str, inputs: Tensor) -> Named:
    """Returns the gradients of the replica, whose output is both sent and used here."""
    with torchweft.autograd.context() as context_id:
        hidden = _replicas[name](inputs)
        loss = (rpc.rpc_sync(SERVER, torch.sin, args=(hidden,)) + hidden).square().mean()
        torchweft.autograd.backward(context_id, [loss])
        return gradients(name, context_id)


def train(name: str, batches: list[Tensor]) -> tuple[list[tuple[Named, Tensor]], Named]:
    """Returns the gradients of each step, and the parameters after the last."""
    references = [rpc.RRef(parameter) for parameter in _replicas[name].parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adam, references, lr=0.1)
    steps = []
    for indices in batches:
        with torchweft.autograd.context() as context_id:
            torchweft.autograd.backward(context_id, [loss_of(name, indices)])
            optimizer.step(context_id)
            remote = rpc.rpc_sync(SERVER, table_gradient, args=(name, context_id))
            steps.append((gradients(name, context_id), remote))
    parameters = {key: tensor.detach() for key, tensor in _replicas[name].module.named_parameters()}
    return steps, parameters


def run_locally_around_a_pass(name: str, indices: Tensor) -> tuple[Named, Named, Named]:
    """Returns ``.grad`` after a plain pass, then a pass in a context, then a plain pass."""

    def run_locally() -> Named:
        _replicas[name](torch.ones(len(indices), WIDTH).double()).sum().backward()
        return {key: grad.clone() for key, grad in grads(name).items()}

    first = run_locally()
    run_pass(name, indices)
    between = {key: grad.clone() for key, grad in grads(name).items()}
    return first, between, run_locally()


def accumulate_without_sync(name: str, batches: list[Tensor]) -> tuple[Named, Named]:
    """Returns the gradients after the passes of all batches but the last, and after the last."""
    with torchweft.autograd.context() as context_id:
        with _replicas[name].no_sync():
            for indices in batches[:-1]:
                torchweft.autograd.backward(context_id, [loss_of(name, indices)])
        local = gradients(name, context_id)
        torchweft.autograd.backward(context_id, [loss_of(name, batches[-1])])
        return local, gradients(name, context_id)


def run_passes_of_two_threads(name: str, batches: list[Tensor]) -> list[Named]:
    """Runs both forward passes before both backward passes, with a thread for each batch."""
    have_gone_forward = threading.Barrier(len(batches))
    may_go_back = [threading.Event() for _ in range(len(batches) + 1)]
    may_go_back[0].set()
    results: dict[int, Named] = {}

    def run(place: int) -> None:
        with torchweft.autograd.context() as context_id:
            loss = loss_of(name, batches[place])
            have_gone_forward.wait(10.0)
            assert may_go_back[place].wait(10.0)
            torchweft.autograd.backward(context_id, [loss])
            may_go_back[place + 1].set()
            results[place] = gradients(name, context_id)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return [results[place] for place in range(len(batches))]


def run_pass_with_hook(name: str, indices: Tensor) -> tuple[int, Named]:
    """Adds a hook that doubles a gradient; returns its number of calls, and the gradients."""
    calls = []

    def double(gradient: Tensor) -> Tensor:
        calls.append(1)
        return 2 * gradient

    handle = _replicas[name].module.first.bias.register_hook(double)
    found, _ = run_pass(name, indices)
    handle.remove()
    return len(calls), found


def run_pass_with_failing_collective(name: str, indices: Tensor) -> None:
    def fail() -> torch.futures.Future[Tensor]:
        raise ValueError("the cable is gone")

    # DDP checks the names of the hook's parameters, and annotations if there are any.
    _replicas[name].register_comm_hook(None, lambda state, bucket: fail())
    run_pass(name, indices)


def run_pass_or_die(name: str, indices: Tensor) -> None:
    """Runs a pass; a trainer other than the first kills itself before the average."""
    if distributed.get_rank() != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    run_pass(name, indices)


def run_pass_through_two_wrappers(name: str, indices: Tensor) -> None:
    wrapper = DistributedDataParallel(_replicas[name].module)
    try:
        run_pass(name, indices)
    finally:
        del wrapper
