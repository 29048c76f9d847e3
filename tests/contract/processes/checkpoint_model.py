"""A model on any workers, without random numbers, for snapshot tests; functions for workers."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.processes.functions import pass_gate
from torchweft import checkpoint, rpc
from torchweft.autograd import backward, context
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer


def linear(place: int, width_in: int, width_out: int) -> nn.Module:
    torch.manual_seed(place)
    return nn.Linear(width_in, width_out)


class Training:
    """A model of three layers, each on any worker, and its optimizer."""

    def __init__(self, *workers: str, kind: Any = torch.optim.Adam, order: str = "012") -> None:
        widths = (4, 6, 5, 1)
        self.layers = [
            RemoteModule(worker, linear, args=(place, widths[place], widths[place + 1]))
            for place, worker in enumerate(workers)
        ]
        references = [
            reference
            for place in order
            for reference in self.layers[int(place)].remote_parameters()
        ]
        extra = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {"lr": 0.1}
        self.optimizer = DistributedOptimizer(kind, references, **extra)
        self.state: dict[str, Any] = {
            "layers": list(self.layers),
            "optimizer": self.optimizer,
            "done": 0,
        }

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.state["done"] += 1
            batch = torch.linspace(-1, 1, 12).reshape(3, 4) * self.state["done"]
            with context() as context_id:
                hidden = batch
                for layer in self.layers:
                    hidden = torch.tanh(layer(hidden))
                loss = hidden.sum()
                backward(context_id, [loss])
                self.optimizer.step(context_id)
            losses.append(float(loss.detach()))
        return losses

    def parameters(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.state_dict().values()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


# Functions for workers


def limit_files(size_bytes: int) -> int:
    """Limits the size of this process's files; returns the former limit."""
    former, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    return former


# Trainers that step independently


class Pair:
    """Two numbers on two workers that a step changes one after the other."""

    def __init__(self, gate: checkpoint.StepGate) -> None:
        self.gate = gate
        self.first = rpc.remote("worker0", torch.zeros, args=(1,))
        self.second = rpc.remote("worker1", torch.zeros, args=(1,))

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}


def add_one(tensor: rpc.RRef[Tensor]) -> None:
    tensor.local_value().add_(1)


def step_often(gate: checkpoint.StepGate, first: Any, second: Any, times: int) -> None:
    for _ in range(times):
        with gate.step():
            rpc.rpc_sync(first.owner(), add_one, args=(first,))
            rpc.rpc_sync(second.owner(), add_one, args=(second,))


def step_through(reference: rpc.RRef[Any], first: Any, second: Any) -> None:
    step_often(checkpoint.StepGate.from_reference(reference), first, second, 1)


def step_half(gate: checkpoint.StepGate, first: Any, second: Any, name: str) -> None:
    with gate.step():
        rpc.rpc_sync(first.owner(), add_one, args=(first,))
        pass_gate(name).wait()
        rpc.rpc_sync(second.owner(), add_one, args=(second,))


# Contents of the files


def last_file(directory: Path, name: str) -> Path:
    latest = checkpoint.latest(directory)
    assert latest is not None
    return Path(latest.path) / name


class Counter:
    """A stateful object that is not a module."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
